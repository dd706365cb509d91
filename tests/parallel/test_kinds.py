"""Every kind of attention over the devices of a mesh: gradients as on one device, and the same text."""

import functools
from typing import Any

import jax
import numpy as np
import pytest

from tests import small
from transformer.generation.decode import Generator, continue_prompts
from transformer.generation.sampling import Sampling
from transformer.model.attention import Attention
from transformer.model.differential import Differential
from transformer.model.grouped import MultiQuery
from transformer.model.latent import Latent
from transformer.model.linear import Linear
from transformer.model.positions import Rotary
from transformer.parallel.mesh import Mesh
from transformer.training.step import sum_gradients

KINDS: dict[str, dict[str, Any]] = {
    "latent": {"attention": Attention(projection=Latent(kv_rank=6, q_rank=10, rope_width=4)), "positions": Rotary()},
    "differential": {"attention": Attention(projection=Differential(), value_residual="learned"), "loops": 2},
    "linear": {"attention": Attention(projection=Linear(), value_residual="fixed", gate=True), "loops": 2},
    "multi_query": {"attention": Attention(projection=MultiQuery())},
}
MESHES = {"context": Mesh(fsdp=2, context=2, tensor=2), "data": Mesh(data=2, fsdp=2, tensor=2)}
LONG = pytest.mark.exhaustive
CASES = [
    ("latent", "context"),
    ("linear", "data"),
    pytest.param("differential", "context", marks=LONG),
    pytest.param("differential", "data", marks=LONG),
    pytest.param("latent", "data", marks=LONG),
]


@functools.cache
def gradients(kind: str, mesh: Mesh) -> Any:
    e = small.experiment(depth=1, mesh=mesh, **KINDS[kind])
    with small.on(mesh):
        state, rows = small.place(e, small.state(e)), small.place_batch(small.batch(e))
        found = small.jit(sum_gradients, static_argnums=0)(e, state, rows)
        return jax.tree.map(np.asarray, found)


@pytest.mark.parametrize(("kind", "mesh"), CASES)
def test_gradients_are_those_of_one_device(kind: str, mesh: str) -> None:
    assert small.farthest(gradients(kind, MESHES[mesh]), gradients(kind, Mesh())) < 1e-5


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", KINDS)
def test_text_is_that_of_one_device(kind: str) -> None:
    found = []
    for mesh in (None, Mesh(data=2, tensor=1 if kind == "multi_query" else 2)):
        e = small.experiment(depth=1, context=16, mesh=mesh, **KINDS[kind])
        generator, prompts = Generator(e, Sampling(temperature=0.0), ()), [[0, 5, 6], [0]]  # it has no end
        if mesh is None:
            (*_, last) = continue_prompts(generator, jax.tree.map(np.asarray, small.weights(e)), prompts, 5)
        else:
            with small.on(mesh):
                (*_, last) = continue_prompts(generator, small.place(e, small.state(e, size=1.0)).params, prompts, 5)
        found.append(last)
    assert found[0] == found[1]
    assert len({*found[0][0].ids}) > 1
