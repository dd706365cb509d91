"""The same training on one device and on eight: initial weights to the bit, gradients and losses to 1e-5.

Weights after an update are never compared: Adam divides by the root of a small number, so a difference in
the last bit of a gradient can be one in the first digit of an update.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import numpy as np
import pytest

from tests import small
from tests.model.variants import RICH
from transformer.model.attention import Attention
from transformer.model.grouped import Grouped
from transformer.model.mlp import Swiglu
from transformer.model.moe import Moe
from transformer.model.positions import Sinusoidal
from transformer.parallel.mesh import Mesh
from transformer.training.optimizer import Muon
from transformer.training.state import init_params, init_state
from transformer.training.step import sum_gradients, train_step

MESHES = {
    "data 8": Mesh(data=8),
    "2 x 2 x 2": Mesh(data=2, fsdp=2, tensor=2),
    "fsdp 8": Mesh(fsdp=8),
    "context 4": Mesh(context=4),
    "slices": Mesh(slice=2, fsdp=2, context=2),
    "context, tensor": Mesh(data=2, context=2, tensor=2),
    "expert 4": Mesh(expert=4),
    "expert, fsdp, tensor": Mesh(expert=2, fsdp=2, tensor=2),
    "expert, slices, context": Mesh(expert=2, slice=2, context=2),
}
STEPS = 10
EXPERIMENTS = {
    # A clip far below the norm, so that it decides the update. Rotary, because without it a key's bias adds the
    # same to all scores of a query: its gradient is zero but for rounding, of which there is nothing to compare.
    "adamw": small.experiment(depth=1, attention=RICH[0], positions=RICH[1], bias=True, train={"clip": 1e-3}),
    "muon": small.experiment(mlp=Swiglu(width=24), stack="scan", tie_embeddings=True, train={"optimizer": Muon()}),
    "blockwise, dropout, parts": small.experiment(
        depth=3,
        attention=Attention(projection=Grouped(kv_heads=2), kernel="blockwise"),
        positions=Sinusoidal(),
        dropout=0.2,
        stack="scan",
        remat="full",
        train={"batch": 16, "accumulate": 2, "optimizer": Muon()},
    ),
    "mixture": small.experiment(
        depth=1,
        mlp=Moe(experts=4, top_k=2, shared=1, width=8, balance=0.1),
        bias=True,
        positions=RICH[1],
        train={"optimizer": Muon()},
    ),
    "mixture, parts": small.experiment(
        depth=1, mlp=Moe(experts=4, top_k=2, width=8, balance=0.1), train={"batch": 16, "accumulate": 2}
    ),
    "accumulated, bfloat16": small.experiment(depth=1, dtype="bfloat16", train={"batch": 16, "accumulate": 2}),
}


class Course(NamedTuple):
    """What ten steps leave: gradients of the first, first moments after it, and of each step loss and norm."""

    gradients: dict
    moments: dict
    losses: list[float]
    norms: list[float]
    tokens: list[float]
    layouts: list


def unequal(e, update):
    """Rows of unlike numbers of targets, so that a mean of the devices' means would be another number."""
    rows = small.batch(e, update)
    kept = np.arange(8) < np.arange(len(rows.tokens_BT))[:, None] + 1
    return rows._replace(weights_BT=rows.weights_BT * kept.astype(np.float32))


@functools.cache
def course(name: str, mesh: Mesh, steps: int = STEPS) -> Course:
    e = dataclasses.replace(EXPERIMENTS[name], mesh=mesh)
    with small.on(mesh):

        @small.jit
        def run(state, rows):
            new, metrics = train_step(e, state, rows)
            return new, metrics, sum_gradients(e, state, rows)[1]

        state = small.place(e, small.state(e))
        layouts = [x.sharding for x in jax.tree.leaves(state)]
        first, read = None, []
        for update in range(steps):
            state, metrics, gradients = run(state, small.place_batch(unequal(e, update)))
            read.append([float(metrics.loss), float(metrics.grad_norm), float(metrics.tokens)])
            if first is None:
                first = jax.tree.map(np.asarray, (gradients, state.opt_state))
        after = [x.sharding for x in jax.tree.leaves(state)]
        assert run._cache_size() == 1
        assert all(
            a.is_equivalent_to(b, x.ndim) for a, b, x in zip(layouts, after, jax.tree.leaves(state), strict=True)
        )
    return Course(*first, *map(list, zip(*read, strict=True)), layouts)


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        ("adamw", "data 8"),
        ("muon", "2 x 2 x 2"),
        ("adamw", "context 4"),
        ("blockwise, dropout, parts", "slices"),
        ("mixture", "expert, fsdp, tensor"),
        ("mixture, parts", "expert, slices, context"),
        pytest.param("adamw", "2 x 2 x 2", marks=pytest.mark.exhaustive),
        pytest.param("muon", "data 8", marks=pytest.mark.exhaustive),
        pytest.param("muon", "slices", marks=pytest.mark.exhaustive),
        pytest.param("blockwise, dropout, parts", "context, tensor", marks=pytest.mark.exhaustive),
        pytest.param("mixture", "expert, slices, context", marks=pytest.mark.exhaustive),
        pytest.param("mixture", "expert 4", marks=pytest.mark.exhaustive),
        pytest.param("mixture", "2 x 2 x 2", marks=pytest.mark.exhaustive),
        pytest.param("adamw", "fsdp 8", marks=pytest.mark.exhaustive),
        pytest.param("muon", "fsdp 8", marks=pytest.mark.exhaustive),
    ],
)
def test_training_is_the_same_on_every_mesh(name, mesh):
    """L02, O08: gradients of step 1 to 1e-5 of each leaf's largest, losses and norms of ten steps to 1e-5.

    The first moments after step 1 are the clipped gradients times a number: the clip uses the norm of the whole.
    """
    one, many = course(name, Mesh()), course(name, MESHES[mesh])
    assert small.farthest(many.gradients, one.gradients) < 1e-5
    assert small.far(many.losses, one.losses) < 1e-5
    np.testing.assert_allclose(many.losses, one.losses, rtol=1e-5)
    assert many.tokens == one.tokens
    assert many.norms[0] == pytest.approx(one.norms[0], rel=1e-5)
    if name == "adamw":
        assert small.farthest(many.moments[0].mu, one.moments[0].mu) < 1e-5


def test_parts_keep_their_rows_on_their_devices():
    """With accumulation, in bfloat16: the same tokens, and losses as near as bfloat16 allows."""
    one, many = (course("accumulated, bfloat16", mesh, 2) for mesh in (Mesh(), Mesh(data=2, fsdp=2, tensor=2)))
    assert many.tokens == one.tokens
    np.testing.assert_allclose(many.losses, one.losses, rtol=2e-3)
    assert small.farthest(many.gradients, one.gradients) < 0.05


def test_a_mesh_of_ones_is_no_mesh():
    """To rounding: whether a mesh is set must not change the mathematics."""
    e = EXPERIMENTS["adamw"]
    _, gradients = small.jit(sum_gradients, static_argnums=0)(e, small.state(e), unequal(e, 0))
    assert small.farthest(course("adamw", Mesh()).gradients, gradients) < 1e-5


def test_weights_are_cut_as_the_rules_say():
    """On 2 x 2 x 2 every large weight is cut over fsdp and tensor, and moments lie as their weights do."""
    e = dataclasses.replace(EXPERIMENTS["adamw"], mesh=Mesh(data=2, fsdp=2, tensor=2))
    with small.on(e.mesh):
        like = jax.eval_shape(lambda: init_state(e))
    total = cut = 0
    for x in jax.tree.leaves(like.params):
        axes = [a for a in x.sharding.spec if a is not None]
        total, cut = total + x.size, cut + x.size / 2 ** len(axes)
        if x.ndim > 2 and x.shape[1] * x.shape[-1] > 32:  # a product's weight, not its bias
            assert sorted(axes) == ["fsdp", "tensor"], x
    assert cut < 0.35 * total
    params, moments = jax.tree.leaves(like.params), jax.tree.leaves(like.opt_state[0].mu)
    assert [x.sharding for x in params] == [x.sharding for x in moments]


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_initial_weights_do_not_depend_on_the_mesh(name):
    """M11: bit-equal on one device, on eight rows and on 2 x 2 x 2."""
    drawn = []
    for mesh in (Mesh(), Mesh(data=8), Mesh(data=2, fsdp=2, tensor=2)):
        e = dataclasses.replace(EXPERIMENTS[name], mesh=mesh)
        with small.on(mesh):
            drawn.append(jax.tree.map(np.asarray, small.jit(init_params, static_argnums=0)(e)))
    for other in drawn[1:]:
        small.assert_same(other, drawn[0])
