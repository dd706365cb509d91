"""What each mesh axis does to the compiled training step: which collectives it has, and how many bytes they move."""

import dataclasses
import functools
import math
import re

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
def program(e: Experiment) -> tuple[str, int]:
    """The compiled step's text, and the bytes of all weights."""
    with small.on(e.mesh):
        state, rows = small.place(e, small.state(e)), small.place_batch(small.batch(e))
        text = jax.jit(train_step, static_argnums=0).lower(e, state, rows).compile().as_text()
    return text, sum(x.nbytes for x in jax.tree.leaves(state.params))


def compiled(mesh: Mesh, of: Experiment = E) -> tuple[list[hlo.Collective], int]:
    """The collectives of a step, and the bytes of all weights."""
    text, weights = program(dataclasses.replace(of, mesh=mesh))
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


@pytest.mark.parametrize("parts", [1, 4])
def test_between_slices_only_gradients_go(parts: int) -> None:
    """Weights are gathered inside a slice; what crosses is each device's part of the gradient, once a step."""
    e = dataclasses.replace(E, train=dataclasses.replace(E.train, batch=8 * parts, accumulate=parts))
    found, weights = compiled(Mesh(slice=2, fsdp=4), e)
    crossing = [c for c in found if c.across]
    assert {c.kind for c in crossing} == {"all-reduce"}
    assert bytes_of(crossing, "all-reduce") < weights / 4 + 2 * FEW


@pytest.mark.parametrize("mesh", [Mesh(data=8), Mesh(data=2, fsdp=2, tensor=2), Mesh(slice=2, fsdp=4)], ids=str)
def test_each_device_draws_the_dropout_of_its_own_rows(mesh: Mesh) -> None:
    """No device ever holds the whole batch's numbers."""
    model, train = dataclasses.replace(E.model, dropout=0.1), dataclasses.replace(E.train, batch=32, accumulate=2)
    text, _ = program(dataclasses.replace(E, model=model, train=train, mesh=mesh))
    drawn = {math.prod(int(n) for n in shape.split(",")) for shape in re.findall(r"u32\[([\d,]+)\]", text)}
    rows = 16 // (mesh.data * mesh.fsdp)  # where slices are apart each draws for all, and keeps its own
    assert max(drawn) == rows * E.model.context * E.model.width


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
