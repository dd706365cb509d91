"""Small models, weights and batches for tests.

Weights are made with NumPy, not with the library's own initialisation, so that every one of them is
away from its initial value (no zero bias, no scale of one) and nothing needs to be compiled.
"""

import functools
import math
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from transformer.config import Experiment
from transformer.data.packing import Batch
from transformer.data.tokenizer import Bpe
from transformer.model.config import Model
from transformer.model.layers import Weight, by_declaration, declared_leaves
from transformer.model.masks import causal
from transformer.model.transformer import Transformer
from transformer.parallel.context import arrange
from transformer.parallel.mesh import Mesh, make_mesh
from transformer.parallel.rules import spec
from transformer.training.config import Train
from transformer.training.state import State, declarations, init_state, optimizer

VOCAB = 24

# A compiler that hurries: the same mathematics, a fifth of the time to compile.
jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


def experiment(*, vocab: int = VOCAB, mesh: Mesh | None = None, train: dict[str, Any] | None = None, **model: Any):
    """A small experiment; keywords are settings of the model."""
    sizes = {"depth": 2, "width": 16, "heads": 4, "context": 8} | model
    steps = {"steps": 10, "batch": 8, "warmup": 2, "learning_rate": 1e-2} | (train or {})
    return Experiment(model=Model(**sizes), tokenizer=Bpe(vocab_size=vocab), train=Train(**steps), mesh=mesh or Mesh())


def weights(e: Experiment, seed: int = 0, size: float = 1.0) -> Any:
    """Random weights as a tree of float32 NumPy arrays; ``size`` scales products and tables."""
    names = iter(declared_leaves(declarations(e)))

    def make(w: Weight) -> np.ndarray:
        draw = np.random.default_rng([seed, zlib.crc32(next(names).encode())]).standard_normal(w.shape)
        if w.role == "scale":
            draw = 1 + 0.3 * draw
        elif w.role == "bias":
            draw = 0.3 * draw
        elif w.inputs:
            draw = size * draw / math.sqrt(math.prod(w.shape[w.copies : w.copies + w.inputs]))
        else:
            draw = size * draw
        return draw.astype(np.float32)

    return by_declaration(make, declarations(e))


def state(e: Experiment, seed: int = 0, size: float = 0.5) -> State:
    """A state before its first step, of ``weights`` and moments of zero."""
    params = weights(e, seed, size)
    moments = jax.eval_shape(optimizer(e).init, params)
    zero = np.zeros((), np.int32)
    return State(zero, zero.copy(), params, jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), moments))


def batch(e: Experiment, seed: int = 0, rows: int | None = None, padding: int = 2) -> Batch:
    """Packed rows: two documents of unlike length in each and ``padding`` at the end of every third."""
    random = np.random.default_rng([seed, 99])
    B, T = rows or e.train.batch, e.model.context
    slots = random.integers(0, e.vocab_size, (B, T + 1)).astype(np.int32)
    segments = np.ones((B, T + 1), np.int32)
    for b in range(B):
        segments[b, random.integers(2, T - padding) :] = 2
        if padding and b % 3 == 2:
            segments[b, T - padding :] = 0
    return pack(slots, segments)


def pack(slots: np.ndarray, segments: np.ndarray) -> Batch:
    """The batch of tokens and segment ids with T + 1 slots a row, by the rules of data.packing."""
    positions = np.zeros_like(slots)
    for b in range(slots.shape[0]):
        for t in range(1, slots.shape[1]):
            same = segments[b, t] == segments[b, t - 1]
            positions[b, t] = positions[b, t - 1] + 1 if same else 0
    counted = (segments[:, :-1] == segments[:, 1:]) & (segments[:, :-1] > 0)
    return Batch(slots[:, :-1], slots[:, 1:], segments[:, :-1], positions[:, :-1], counted.astype(np.float32))


def logits(e: Experiment, params: Any, rows: Batch) -> jax.Array:
    """The model's logits [B, T, V] of packed rows, without dropout."""
    params, rows = jax.tree.map(jnp.asarray, (params, rows))
    model = Transformer(e.model, e.vocab_size)
    mask = causal(rows.tokens_BT.shape[1], rows.segments_BT)
    return model.apply({"params": params}, rows.tokens_BT, rows.positions_BT, mask)[0]


compiled_logits = jit(logits, static_argnums=0)


@contextmanager
def on(mesh: Mesh) -> Iterator[None]:
    """Inside, arrays are laid out over ``mesh``."""
    with jax.set_mesh(make_mesh(mesh)):
        yield


def place(e: Experiment, tree: State) -> State:
    """A state of NumPy arrays, laid out over the mesh that is set as the training would have it."""
    like = jax.eval_shape(lambda: init_state(e))
    mesh = jax.sharding.get_mesh()

    def put(x: Any, a: Any) -> jax.Array:
        return jax.device_put(x, NamedSharding(mesh, a.sharding.spec if a.sharding is not None else PartitionSpec()))

    return jax.tree.map(put, tree, like)


def place_batch(rows: Batch) -> Batch:
    return jax.device_put(jax.tree.map(arrange, rows), NamedSharding(jax.sharding.get_mesh(), spec("batch", "time")))


def far(found: Any, wanted: Any) -> float:
    """The largest difference, as a share of the largest wanted value."""
    found, wanted = np.asarray(found, np.float64), np.asarray(wanted, np.float64)
    largest = np.abs(wanted).max()
    return float(np.abs(found - wanted).max() / (largest if largest else 1.0))


def farthest(found: Any, wanted: Any) -> float:
    """``far`` of the worst leaf of two trees."""
    return max(jax.tree.leaves(jax.tree.map(far, found, wanted)))


def assert_same(found: Any, wanted: Any) -> None:
    """Bit for bit, dtypes and not-a-numbers included."""
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        assert a.dtype == b.dtype and a.shape == b.shape
        assert a.tobytes() == b.tobytes()
