"""Dropout: one mask for every branch, block, step and part; none in evaluation."""

import jax
import numpy as np
import pytest
from flax import linen as nn

from tests import small
from transformer.model.masks import causal
from transformer.model.norms import Norm
from transformer.model.transformer import Transformer
from transformer.training.step import part_gradients

DEPTH, RATE = 4, 0.5


def final_stream(e, params, key, train) -> np.ndarray:
    """What the last norm reads: the residual stream after all blocks."""
    rows = small.batch(e, rows=4, padding=0)
    seen = []

    def watch(call, args, kwargs, context):
        if isinstance(context.module, Norm) and context.module.name == "final_norm":
            seen.append(args[0])
        return call(*args, **kwargs)

    def run(params, key):
        with nn.intercept_methods(watch):
            model = Transformer(e.model, e.vocab_size, train)
            model.apply({"params": params}, rows.tokens_BT, rows.positions_BT, causal(8), rngs={"dropout": key})
        return seen[-1]

    return np.asarray(small.jit(run)(params, key))


def bits(e, key, train=True) -> np.ndarray:
    """Every dropout's mask, [2 L + 1, values]: each branch adds a power of two of its own to a stream of ones.

    All products are zero, so a branch gives its last bias: 1, 2, 4, ... in the order in which they are added.
    """
    params = jax.tree.map(np.zeros_like, small.weights(e))
    params["embedding"] = np.full_like(params["embedding"], 2.0 ** (2 * DEPTH))
    for block in range(DEPTH):
        params["blocks"]["attention"]["out"]["b"][block] = 2.0 ** (2 * block)
        params["blocks"]["mlp"]["down"]["b"][block] = 2.0 ** (2 * block + 1)
    total = final_stream(e, params, key, train) * ((1 - RATE) if train else 1)
    assert np.array_equal(total, np.round(total))  # the kept ones are scaled up by exactly 1 / (1 - rate)
    return (total.astype(np.int64).reshape(-1) >> np.arange(2 * DEPTH + 1)[:, None]) & 1


@pytest.mark.parametrize("stack", ["scan", "unroll"])
def test_masks_differ_by_branch_block_and_step(stack):
    """M10: four blocks, rate 0.5, an input of ones, two steps: nine masks of their own in each; none in evaluation."""
    e = small.experiment(depth=DEPTH, dropout=RATE, bias=True, stack=stack)
    first, second = (bits(e, jax.random.key(step)) for step in (0, 1))
    masks = np.concatenate([first, second])
    for i in range(len(masks)):
        assert 0.4 < masks[i].mean() < 0.6
        for j in range(i):
            assert 0.35 < (masks[i] == masks[j]).mean() < 0.65, (i, j)
    assert bits(e, jax.random.key(0), train=False).all()


def test_scan_and_unroll_drop_the_same():
    scan, unroll = (small.experiment(depth=DEPTH, dropout=RATE, bias=True, stack=s) for s in ("scan", "unroll"))
    np.testing.assert_array_equal(bits(scan, jax.random.key(0)), bits(unroll, jax.random.key(0)))


def test_masks_come_from_seed_step_and_part():
    """The training step draws anew for each of them, and the same again for the same."""
    e = small.experiment(depth=1, dropout=RATE)
    rows = small.batch(e)
    run = small.jit(part_gradients, static_argnums=0)

    def loss(seed=0, step=0, part=0):
        return float(run(e, small.state(e)._replace(step=np.int32(step)), rows, part, np.uint32(seed))[0].loss)

    assert loss() == loss()
    assert len({loss(), loss(step=1), loss(part=1), loss(seed=1)}) == 4


def test_no_dropout_asks_for_no_key():
    e = small.experiment(depth=1, dropout=RATE)
    small.compiled_logits(e, small.weights(e), small.batch(e, rows=1))  # evaluation: no key is given
