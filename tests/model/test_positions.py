"""Positions: what rotary promises, and precision far from the start."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from tests import small
from transformer.model.positions import POSITIONS, Learned, Rotary, Sinusoidal, angles, rotate
from transformer.model.scores import alibi_slopes

FAR = np.array([[256, 257, 258]], np.int32)


@pytest.mark.parametrize("kind", [Rotary(), Sinusoidal()])
def test_rotary_and_sinusoidal_angles_are_float32_under_bfloat16(kind):
    """M02: cos(257) is 0.8193; angles in bfloat16 would make 257 out to be 256, whose cosine is -0.0398."""
    e = small.experiment(positions=kind, dtype="bfloat16", init_std=1.0)
    signal = POSITIONS[type(kind)](e.model).apply({}, FAR)
    if isinstance(kind, Rotary):
        cos, sin = signal.rotation
    else:
        half = e.model.width // 2
        sin, cos = signal.added_BTD[..., :half], signal.added_BTD[..., half:]
    assert cos.dtype == sin.dtype == jnp.float32
    for i, place in enumerate(FAR[0]):
        assert float(cos[0, i, 0]) == pytest.approx(math.cos(place), abs=2e-5)
        assert float(sin[0, i, 0]) == pytest.approx(math.sin(place), abs=2e-5)
    assert float(cos[0, 1, 0]) == pytest.approx(0.8193, abs=1e-4)


def test_rotation_is_done_in_float32_and_rounded_once():
    """M02: a bfloat16 query at 256 and at 257 is turned exactly as float64 would, up to its own last rounding."""
    x = jnp.asarray(np.random.default_rng(0).standard_normal((1, 3, 2, 8)), jnp.bfloat16)
    angle = angles(FAR, 8, 10_000.0)
    found = rotate(x, (jnp.cos(angle), jnp.sin(angle)))
    assert found.dtype == jnp.bfloat16
    exact = np.asarray(x, np.float64)
    turn = FAR[0][:, None] * 10_000.0 ** (-np.arange(0, 8, 2) / 8)
    pairs = (exact[..., :4] + 1j * exact[..., 4:]) * np.exp(1j * turn)[None, :, None]
    wanted = np.concatenate([pairs.real, pairs.imag], -1)
    np.testing.assert_allclose(np.asarray(found, np.float64), wanted, rtol=2**-8, atol=1e-4)


def test_angles_fall_from_one_by_the_base():
    """Position times base^(-2i/features), by hand."""
    np.testing.assert_allclose(angles(np.array([[0, 1, 3]]), 4, 100.0)[0], [[0, 0], [1, 0.1], [3, 0.3]], rtol=1e-6)


@pytest.mark.parametrize(
    ("heads", "powers"), [(8, range(1, 9)), (6, [2, 4, 6, 8, 1, 3]), (12, [*range(1, 9), 0.5, 1.5, 2.5, 3.5])]
)
def test_the_slopes_of_alibi(heads, powers):
    """M03: 2^-1 to 2^-8 for 8 heads; 6 have those of 4, then of 8 the first and the third."""
    np.testing.assert_array_equal(alibi_slopes(heads), np.float32(2.0) ** -np.array(powers, np.float32))


def test_only_the_distance_matters_to_rotary():
    """The product of a rotated query and key depends on the difference of their positions alone."""
    random = np.random.default_rng(0)
    q, k = (random.standard_normal((1, 1, 1, 8)).astype(np.float32) for _ in range(2))

    def product(t: int, s: int) -> float:
        turned = []
        for x, place in ((q, t), (k, s)):
            angle = angles(np.array([[place]]), 8, 50.0)
            turned.append(np.asarray(rotate(x, (jnp.cos(angle), jnp.sin(angle)))))
        return float((turned[0] * turned[1]).sum())

    for t, s in ((0, 0), (3, 1), (7, 0)):
        for shift in (1, 10, 500):
            assert product(t + shift, s + shift) == pytest.approx(product(t, s), abs=3e-4)
    assert abs(product(3, 1) - product(3, 2)) > 0.1


def test_shifting_a_text_changes_nothing_under_rotary_and_much_under_the_others():
    """All positions moved by the same number: equal logits with rotary only."""
    for kind in (Rotary(base=50.0), Learned(), Sinusoidal()):
        e = small.experiment(positions=kind, init_std=1.0)
        params, rows = small.weights(e), small.batch(e, rows=2, padding=0)
        rows = rows._replace(tokens_BT=rows.tokens_BT[:, :5], segments_BT=np.ones((2, 5), np.int32))
        places = np.tile(np.arange(5, dtype=np.int32), (2, 1))
        here, there = (small.compiled_logits(e, params, rows._replace(positions_BT=places + shift)) for shift in (0, 3))
        if isinstance(kind, Rotary):
            assert small.far(there, here) < 1e-5
        else:
            assert small.far(there, here) > 1e-2
