"""Which tokens may be drawn: every filter against arithmetic, and against a plain NumPy form of it."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from transformer.errors import UserError
from transformer.generation.sampling import Sampling, check, choose, keep_min_p, keep_top_k, keep_top_p, penalise

LEAST = np.finfo(np.float32).tiny


def log(*probabilities: float, dtype: str = "float32") -> jax.Array:
    return jnp.log(jnp.asarray([probabilities], jnp.float32)).astype(dtype)


def kept(logits: jax.Array) -> list[int]:
    """Which tokens are left in the one row."""
    return np.flatnonzero(np.asarray(logits[0], np.float32) > -np.inf).tolist()


def drawn(sampling: Sampling, probabilities: list[float], draws: int = 512) -> dict[int, float]:
    """The share of each token over many draws."""
    logits = jnp.tile(log(*probabilities), (draws, 1))
    keys = jax.random.split(jax.random.key(0), draws)
    ids = np.asarray(choose(sampling, logits, jnp.zeros((draws, 0), bool), keys))
    assert ids.dtype == np.int32
    values, counts = np.unique(ids, return_counts=True)
    return dict(zip(values.tolist(), (counts / draws).tolist(), strict=True))


@pytest.mark.parametrize(("p", "dtype"), [(0.0, "float32"), (1e-3, "bfloat16"), (1e-8, "float32"), (0.0, "bfloat16")])
def test_a_tiny_p_keeps_the_most_likely(p: float, dtype: str) -> None:
    """G10: p = 0, 1e-3 in bf16, 1e-8 in fp32: the most likely token always stays."""
    assert kept(keep_top_p(log(0.2, 0.5, 0.3, dtype=dtype), p)) == [1]
    assert kept(keep_top_p(jnp.zeros((1, 4), dtype), p)) == [0], "of equals the first"


def test_the_token_that_crosses_p_stays() -> None:
    """G11: .5 .41 .09 with p = .9: two tokens."""
    assert kept(keep_top_p(log(0.5, 0.41, 0.09), 0.9)) == [0, 1]
    assert kept(keep_top_p(log(0.09, 0.41, 0.5), 0.92)) == [0, 1, 2]
    assert kept(keep_top_p(log(0.09, 0.41, 0.5), 1.0)) == [0, 1, 2]
    assert set(drawn(Sampling(temperature=1.0, top_p=0.9), [0.5, 0.41, 0.09])) == {0, 1}


@pytest.mark.parametrize(("k", "wanted"), [(0, 4), (1, 1), (4, 4), (5, 4), (2, 2)])
def test_k_of_nothing_and_of_more_than_the_vocabulary_is_off(k: int, wanted: int) -> None:
    """G12: k = 0 off, 1 greedy, V and V + 1 off."""
    assert len(kept(keep_top_k(log(0.1, 0.4, 0.3, 0.2), k))) == wanted
    assert len(drawn(Sampling(temperature=1.0, top_k=k), [0.1, 0.4, 0.3, 0.2])) == wanted


def test_tokens_as_likely_as_the_kth_stay() -> None:
    """G12: ties, as stated."""
    assert kept(keep_top_k(log(0.3, 0.1, 0.3, 0.3), 1)) == [0, 2, 3]


def test_top_k_comes_first_and_top_p_sees_what_it_left_renormalised() -> None:
    """G13: k = 3 and p = .5 on .4 .3 .2 .1: two tokens. p = .42 tells the order: .4 of .9 is more than that."""
    probabilities = [0.4, 0.3, 0.2, 0.1]
    both = Sampling(temperature=1.0, top_k=3, top_p=0.5)
    assert set(drawn(both, probabilities)) == {0, 1}
    assert set(drawn(Sampling(temperature=1.0, top_k=3, top_p=0.42), probabilities)) == {0}
    assert set(drawn(Sampling(temperature=1.0, top_p=0.42), probabilities)) == {0, 1}
    # min-p is last, and relative to the most likely: nothing before it changes that ratio.
    assert set(drawn(Sampling(temperature=1.0, top_k=3, min_p=0.6), probabilities)) == {0, 1}


@pytest.mark.parametrize("temperature", [0.0, 1e-9, 1e-40])
def test_no_temperature_is_greedy(temperature: float) -> None:
    """G14: T = 0 and 1e-9; of equal tokens the first."""
    check(Sampling(temperature=temperature))
    assert Sampling(temperature=temperature).greedy
    assert drawn(Sampling(temperature=temperature), [0.2, 0.4, 0.4], 16) == {1: 1.0}


@pytest.mark.parametrize(
    "wrong",
    [
        Sampling(temperature=-1.0),
        Sampling(temperature=math.nan),
        Sampling(temperature=math.inf),
        Sampling(top_p=-0.1),
        Sampling(top_p=1.1),
        Sampling(top_p=math.nan),
        Sampling(min_p=-0.1),
        Sampling(min_p=1.1),
        Sampling(min_p=math.nan),
        Sampling(top_k=-1),
        Sampling(repetition_penalty=0.0),
        Sampling(repetition_penalty=-1.0),
        Sampling(repetition_penalty=math.nan),
        Sampling(repetition_penalty=math.inf),
    ],
    ids=str,
)
def test_values_out_of_range_are_refused(wrong: Sampling) -> None:
    """G14: T = -1 and NaN; G15: p = -0.1, 1.1 and NaN."""
    with pytest.raises(UserError, match=r"^--\w+: "):
        check(wrong)


@pytest.mark.parametrize("name", ["top_k", "top_p", "min_p"])
def test_a_filter_that_greedy_choice_makes_pointless_is_refused(name: str) -> None:
    values = {"top_k": 3, "top_p": 0.5, "min_p": 0.1}
    with pytest.raises(UserError, match=f"^--{name}: has no effect at temperature 0"):
        check(Sampling(temperature=0.0, **{name: values[name]}))  # type: ignore[arg-type]
    check(Sampling(temperature=0.5, **values))  # type: ignore[arg-type]
    check(Sampling(top_p=0.0, min_p=1.0))


def test_temperature_sharpens_and_flattens() -> None:
    """The share of a token is proportional to p^(1/T)."""
    for temperature, wanted in ((1.0, 0.8), (2.0, 2 / 3), (0.5, 0.64 / 0.68)):
        assert drawn(Sampling(temperature=temperature), [0.8, 0.2], 4096)[0] == pytest.approx(wanted, abs=0.025)


def test_the_repetition_penalty_lowers_logits_of_either_sign() -> None:
    """arXiv:1909.05858, section 4.1, for positive logits; negative ones are multiplied."""
    logits = jnp.asarray([[2.0, -2.0, 2.0, -2.0]])
    seen = jnp.asarray([[True, True, False, False]])
    assert penalise(logits, seen, 2.0).tolist() == [[1.0, -4.0, 2.0, -2.0]]


# Multiples of 1/8: many ties, and no numbers so small that the device takes them for zero.
logits = st.lists(st.integers(-64, 64), min_size=6, max_size=6).map(lambda v: np.asarray([v], np.float32) / 8)
no_deadline = settings(deadline=None)  # the first call compiles


@no_deadline
@given(logits, st.integers(0, 7))
def test_top_k_against_numpy(values: np.ndarray, k: int) -> None:
    wanted = values[0] >= np.sort(values[0])[::-1][min(k, 6) - 1] if k else np.ones(6, bool)
    out = np.asarray(keep_top_k(jnp.asarray(values), k)[0])
    assert ((out > -np.inf) == wanted).all() and (out[wanted] == values[0][wanted]).all()


@no_deadline
@given(logits, st.floats(0, 1))
def test_top_p_against_numpy(values: np.ndarray, p: float) -> None:
    """The smallest set of most likely tokens that reaches p, by a loop."""
    exact = np.exp(values[0].astype(np.float64))
    exact /= exact.sum()
    chosen: list[int] = []
    reached = 0.0
    for token in np.argsort(-values[0], kind="stable"):
        assume(p == 0 or abs(reached - p) > 1e-5)  # nearer than rounding
        if chosen and reached >= p:
            break
        chosen.append(int(token))
        reached += exact[token]
    assert kept(keep_top_p(jnp.asarray(values), p)) == sorted(chosen)


@no_deadline
@given(logits, st.floats(0, 1))
def test_min_p_against_numpy(values: np.ndarray, p: float) -> None:
    ratio = np.exp(values[0].astype(np.float64) - values[0].max())
    assume((np.abs(ratio - p) > 1e-5 * max(p, 1e-6)).all() or p == 0)
    assume(p == 0 or p > LEAST)
    assert kept(keep_min_p(jnp.asarray(values), p)) == np.flatnonzero(ratio >= p).tolist()


@no_deadline
@given(logits, st.integers(0, 7), st.floats(0, 1), st.floats(0, 1))
def test_any_mixture_of_filters_leaves_the_most_likely(values: np.ndarray, k: int, p: float, m: float) -> None:
    out = keep_min_p(keep_top_p(keep_top_k(jnp.asarray(values), k), p), m)
    assert int(jnp.argmax(out[0])) == int(values[0].argmax())
    assert float(out.max()) > -np.inf and not np.isnan(np.asarray(out)).any()
