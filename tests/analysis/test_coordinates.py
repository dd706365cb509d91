"""The coordinate check: flat where a parametrisation's rules say so, and not flat under the standard one."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import small
from tests.test_cli import TINY, refused, run
from transformer.analysis import coordinates
from transformer.analysis.coordinates import FLAT, PARTS, moved, resized, slope
from transformer.model.mlp import Gelu
from transformer.model.parametrisation import Completep, DepthMup, Mup, Standard
from transformer.parallel.mesh import Mesh, make_mesh
from transformer.training.optimizer import Adamw, Muon

SIZES = {"base_width": 32, "base_head_width": 8}
KINDS = {
    "standard": Standard(),
    "mup": Mup(**SIZES),
    "depth_mup": DepthMup(**SIZES, base_depth=2),
    "completep": Completep(**SIZES, base_depth=2),
}
STEPS = 5


def sized(name, muon=False):
    """The base model: two blocks of width 32."""
    model = {"width": 32, "heads": 4, "context": 16, "parametrisation": KINDS[name]}
    optimizer = Muon() if muon else Adamw()
    return small.experiment(train={"batch": 4, "learning_rate": 3e-3, "optimizer": optimizer}, **model)


@functools.cache
def far(name, over, size, muon=False):
    """How far each part moves at one size. At the base sizes all parametrisations are one."""
    at_base = size == {"width": 32, "depth": 2}[over]
    return moved(resized(sized("standard" if at_base else name, muon), over, size), STEPS)


def powers(name, over, sizes, muon=False):
    return {part: slope(sizes, [far(name, over, size, muon)[part] for size in sizes]) for part in PARTS}


def check(name, over, sizes, muon=False):
    """Flat where the rules say so; of the others the stream must grow, or the check could not fail."""
    found = powers(name, over, sizes, muon)
    flat = coordinates.flat_by_rule(sized(name), over)
    assert all(abs(found[part]) <= FLAT for part in flat), (name, over, found)
    if not flat:
        assert found["stream"] > 1.5 * FLAT, (name, over, found)


@pytest.mark.parametrize("name", ["standard", "completep"])
def test_parts_are_flat_over_the_depth_where_they_must_be(name):
    check(name, "depth", (2, 16))


@pytest.mark.exhaustive
@pytest.mark.parametrize("muon", [False, True], ids=["adamw", "muon"])
@pytest.mark.parametrize("name", KINDS)
def test_parts_are_flat_from_2_to_64_blocks_where_they_must_be(name, muon):
    check(name, "depth", (2, 8, 32, 64), muon)


@pytest.mark.exhaustive
@pytest.mark.parametrize("muon", [False, True], ids=["adamw", "muon"])
@pytest.mark.parametrize("name", KINDS)
def test_parts_are_flat_over_the_width_where_they_must_be(name, muon):
    check(name, "width", (32, 64, 128, 256), muon)


def test_the_power_is_that_of_the_sizes():
    assert slope([2, 4, 8], [3 * x**-0.7 for x in (2, 4, 8)]) == pytest.approx(-0.7)
    assert slope([2, 4], [1.0, math.nan]) == slope([2, 4], [0.0, 1.0]) == math.inf


def test_a_wider_model_has_more_heads_of_the_same_width_and_a_wider_mlp():
    e = small.experiment(width=16, heads=4, mlp=Gelu(width=40))
    wide = resized(e, "width", 32).model
    assert (wide.width, wide.heads, wide.head_size, wide.mlp.width) == (32, 8, 4, 80)
    assert resized(e, "depth", 5).model.depth == 5 and resized(e, "depth", 5).train.warmup == 0


def test_what_moves_is_the_difference_of_outputs_before_and_after(monkeypatch):
    """With weights set by hand: an embedding that is twice as large after the steps has moved by its own size."""
    e = resized(sized("standard"), "depth", 1)
    with jax.set_mesh(make_mesh(Mesh())):
        monkeypatch.setattr(coordinates, "fresh_state", lambda e: jax.tree.map(jnp.asarray, small.state(e)))
        monkeypatch.setattr(coordinates, "train_step", lambda p, s, b, given: (doubled(s), None))
        found = moved(e, 1)
        batch = coordinates.random_batch(e)
    params = small.state(e).params
    own = params["embedding"][np.asarray(batch.tokens_BT)]
    assert found["embedding"] == pytest.approx(np.sqrt((own.astype(np.float64) ** 2).mean()), rel=1e-5)
    assert found["stream"] > 0 and found["logits"] > 0 and found["attention"] > 0


def doubled(state):
    return state._replace(params=state.params | {"embedding": 2 * state.params["embedding"]})


def test_the_command_names_what_grows_and_what_must_not(monkeypatch):
    """Without training anything: parts that move with the power of the size that is put in."""
    made = []

    def fake(e, steps):
        made.append((e.model.depth, e.model.width, steps))
        return {part: e.model.depth**0.9 * e.model.width**-0.5 for part in PARTS}

    monkeypatch.setattr(coordinates, "moved", fake)
    words = ("coordinates", TINY, "--depths=8,2", "--widths=64,128", "--steps=3")
    found = run(*words, "--config.model.parametrisation=depth_mup")
    assert found.status == 0
    assert made == [(2, 64, 3), (2, 128, 3), (2, 64, 3), (8, 64, 3)]
    depth = found.out.split("\n\ndepth")[1]
    assert "0.90  grows, and must be flat" in depth and depth.count("must be flat") == 3  # not of branches
    assert "-0.50  shrinks, and must be flat" in found.out
    standard = run(*words)
    assert "must be" not in standard.out and "grows" in standard.out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--depths=2,2"], "--depths: 2,2 are not different"),
        (["--depths=2,x"], "--depths: 2,x are not different"),
        (["--depths=0,2"], "--depths: 0,2 are not different"),
        (["--depths=2"], "give two sizes or more"),
        (["--widths=64,72"], "--widths: 72 is not 64 times a whole number of 4 heads"),
        (["--steps=0"], "--steps: 0 is too small"),
    ],
)
def test_sizes_that_cannot_be_are_refused(words, message):
    assert message in refused("coordinates", TINY, *words)
