"""What each mesh axis does to the compiled training step: which collectives it has, and how many bytes they move."""

import dataclasses
import functools
import math

import jax
import pytest

from tests import small
from transformer.analysis import hlo
from transformer.config import Experiment
from transformer.model.moe import Moe
from transformer.parallel.mesh import Mesh, sizes
from transformer.training.step import train_step

E = small.experiment(depth=2, width=32, heads=4, context=32, vocab=64, stack="scan")
TABLE = 64 * 32 * 4  # bytes of the embedding
FEW = 2048  # bytes: of scalars, of norms


MIXTURE = dataclasses.replace(E, model=dataclasses.replace(E.model, mlp=Moe(experts=8, top_k=2, width=16)))


@functools.cache
def compiled(mesh: Mesh, of: Experiment = E) -> tuple[list[hlo.Collective], int]:
    """The collectives of a step, and the bytes of all weights."""
    e = dataclasses.replace(of, mesh=mesh)
    with small.on(mesh):
        state, rows = small.place(e, small.state(e)), small.place_batch(small.batch(e))
        text = jax.jit(train_step, static_argnums=0).lower(e, state, rows).compile().as_text()
    weights = sum(x.nbytes for x in jax.tree.leaves(state.params))
    return list(hlo.collectives(*hlo.parse(text), math.prod(sizes(mesh).values()), mesh.slice)), weights


def bytes_of(found: list[hlo.Collective], *kinds: str) -> float:
    return sum(c.times * c.size for c in found if c.kind in kinds)


@pytest.mark.parametrize("mesh", [Mesh(data=8), Mesh(slice=2, data=4)], ids=["data", "slices"])
def test_copies_add_up_their_gradients_once_and_gather_nothing(mesh: Mesh) -> None:
    found, weights = compiled(mesh)
    assert {c.kind for c in found} == {"all-reduce"}
    assert weights <= bytes_of(found, "all-reduce") < weights + FEW
    assert all(c.across for c in found) == (mesh.slice > 1)


def test_weights_that_are_cut_are_gathered_for_use_and_their_gradients_added_up() -> None:
    """Those of blocks forward and backward, so at most twice; never a whole table."""
    found, weights = compiled(Mesh(fsdp=8))
    assert weights - 2 * TABLE < bytes_of(found, "all-gather") < 2 * weights
    assert max(c.size for c in found if c.kind == "all-gather") <= 32 * 128 * 4
    assert bytes_of(found, "all-reduce", "reduce-scatter") < weights + FEW


def test_cut_heads_gather_no_weights() -> None:
    """Activations are added up; the vocabulary, and so the logits, are never in one place."""
    found, _ = compiled(Mesh(tensor=4))
    assert {c.kind for c in found} == {"all-reduce"}
    logits = E.train.batch * E.model.context * 64 * 4
    assert max(c.size for c in found) < 3 * logits
    assert not any("64]" in c.shape for c in found)


def test_cut_rows_gather_keys_and_values_alone() -> None:
    found, weights = compiled(Mesh(context=4))
    keys = E.train.batch * E.model.context * 32 * 4
    gathered = [c for c in found if c.kind == "all-gather"]
    assert sum(c.times for c in gathered if c.size == keys) == 4, "keys and values of two blocks"
    assert all(c.size <= keys // 8 for c in gathered if c.size != keys), "besides those only segments"
    assert weights < bytes_of(found, "all-reduce", "reduce-scatter") < weights + 2 * 2 * 2 * keys + FEW


def test_between_slices_only_gradients_go() -> None:
    """Weights are gathered inside a slice; what crosses is each device's part of the gradient, once."""
    found, weights = compiled(Mesh(slice=2, fsdp=4))
    crossing = [c for c in found if c.across]
    assert {c.kind for c in crossing} == {"all-reduce"}
    assert bytes_of(crossing, "all-reduce") < weights / 4 + 2 * FEW


def test_cut_experts_exchange_tokens_and_leave_their_weights_where_they_are() -> None:
    """Per block the tokens go to the experts and the sums back, and the same backward; gradients of experts cross no
    device, those of all other weights are added up once."""
    found, weights = compiled(Mesh(expert=8), MIXTURE)
    experts = 2 * 8 * 3 * 32 * 16 * 4
    tokens = E.train.batch * E.model.context * 32 * 4
    choices = E.train.batch * E.model.context * 2 * 4  # their numbers, and their weights
    assert {c.size for c in found if c.kind == "all-gather"} == {tokens, choices}
    assert {c.size for c in found if c.kind == "reduce-scatter"} == {tokens, choices}
    assert weights - experts <= bytes_of(found, "all-reduce") < weights - experts + 2 * FEW
