"""Initial weights: their size by role, and that the stream's variance does not depend on the depth."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from tests import small
from transformer.model.config import Model
from transformer.model.layers import by_declaration, declared_leaves
from transformer.model.masks import causal
from transformer.model.norms import Norm
from transformer.model.transformer import Transformer
from transformer.training.state import declarations, init_params

SEEDS, DEPTH = 40, 12


def init(e, key):
    index = jnp.zeros((1, 1), jnp.int32)
    return Transformer(e.model, e.vocab_size).init(key, index, index, causal(1))["params"]


def keys(count: int):
    return jax.vmap(jax.random.key)(jnp.arange(count))


def test_initial_sizes_by_role():
    """M09: 0.02 everywhere but for what writes to the stream, which has 0.02 / sqrt(2 L); over many seeds.

    At 12 blocks of width 768 that is 0.00408. Norm scales are 1 and biases 0, exactly.
    """
    assert Model(depth=12, width=768, heads=12).residual_std == pytest.approx(0.00408, abs=5e-6)
    e = small.experiment(depth=DEPTH, width=16, bias=True)
    drawn = small.jit(jax.vmap(lambda key: init(e, key)))(keys(SEEDS))

    def check(w, x):
        x = np.asarray(x, np.float64)
        if w.role in ("scale", "bias"):
            assert (x == (w.role == "scale")).all()
            return None
        wanted = 0.02 / np.sqrt(2 * DEPTH) if w.role == "residual" else 0.02
        error = 5 / np.sqrt(2 * x.size)  # five standard errors
        assert x.std() == pytest.approx(wanted, rel=error)
        assert abs(x.mean()) < 5 * wanted / np.sqrt(x.size)
        if w.stacked:  # and block by block
            each = x.std(axis=(0, *range(2, x.ndim)))
            np.testing.assert_allclose(each, wanted, rtol=error * np.sqrt(DEPTH))
        return None

    by_declaration(check, declarations(e), drawn)


def test_no_two_weights_are_equal():
    """Blocks, and weights of one shape within a block, are drawn apart; another seed gives others throughout."""
    e = small.experiment(depth=3, width=16, heads=4)
    one, two = (declared_leaves(small.jit(lambda k: init(e, k))(key)) for key in keys(2))
    roles = declared_leaves(declarations(e))
    pieces = []
    for tree in (one, two):
        for path, x in tree.items():
            if roles[path].role not in ("scale", "bias"):
                pieces += [np.asarray(p).ravel()[:64] for p in (x if roles[path].stacked else [x])]
    assert len({p.tobytes() for p in pieces}) == len(pieces)
    for i, a in enumerate(pieces):
        for b in pieces[:i]:
            if a.size == b.size:
                assert abs(np.corrcoef(a, b)[0, 1]) < 0.6


def stream_variance(e, key) -> jax.Array:
    """Mean square of the residual stream after the last block, at initialisation."""
    tokens = jax.random.randint(jax.random.key(7), (4, 8), 0, e.vocab_size)
    index = jnp.tile(jnp.arange(8, dtype=jnp.int32), (4, 1))
    seen = []

    def watch(call, args, kwargs, context):
        if isinstance(context.module, Norm) and context.module.name == "final_norm":
            seen.append(args[0])
        return call(*args, **kwargs)

    params = init(e, key)
    with nn.intercept_methods(watch):
        Transformer(e.model, e.vocab_size).apply({"params": params}, tokens, index, causal(8))
    return jnp.square(seen[-1]).mean()


def test_the_streams_variance_at_initialisation_is_flat_from_2_to_48_blocks():
    """M09. Without the factor the 48 blocks' would be some twenty times that of 2."""
    variances = []
    for depth in (2, 48):
        e = small.experiment(depth=depth, width=32, stack="scan", init_std=0.1)
        variances.append(float(small.jit(jax.vmap(lambda k, e=e: stream_variance(e, k)))(keys(16)).mean()))
    embedding = 2 * 0.1**2
    assert min(variances) > 3 * embedding  # the branches make up most of it
    assert max(variances) / min(variances) < 1.15


def test_initial_weights_come_from_train_seed():
    e = small.experiment(depth=1)
    other = dataclasses.replace(e, train=dataclasses.replace(e.train, seed=1))
    run = small.jit(init_params, static_argnums=0)
    small.assert_same(run(e), run(e))
    assert not np.array_equal(run(e)["embedding"], run(other)["embedding"])
