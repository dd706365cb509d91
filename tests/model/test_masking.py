"""Who sees whom: causality, packed documents, padding. Where nothing may flow, the difference is exactly 0."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import small
from tests.model.variants import ATTENTION
from transformer.model import kernels
from transformer.model.masks import Mask, causal
from transformer.training.loss import token_sums

KINDS = pytest.mark.parametrize(
    ("attention", "positions"),
    ATTENTION,
    ids=[f"{type(a.projection).__name__}-{type(p).__name__}" for a, p in ATTENTION],
)
DTYPES = pytest.mark.parametrize("dtype", ["float32", "bfloat16"])

# A row of two documents and padding: A A A B B B B .
SEGMENTS = np.array([[1, 1, 1, 2, 2, 2, 2, 0]], np.int32)


def row(e, tokens=None) -> small.Batch:
    slots = np.arange(1, 10, dtype=np.int32)[None] if tokens is None else tokens
    return small.pack(slots, np.concatenate([SEGMENTS, [[0]]], 1).astype(np.int32))


@KINDS
def test_gradients_flow_from_the_past_of_the_same_document_only(attention, positions):
    """The Jacobian of the logits at t by the embedding at s is 0 for s > t, and not 0 for s up to t."""
    e = small.experiment(attention=attention, positions=positions)
    params, rows = small.weights(e), row(e)  # all tokens differ, so a row of the table is one position
    mix_V = np.random.default_rng(0).standard_normal(e.vocab_size).astype(np.float32)

    def mixed(embedding):
        return small.logits(e, params | {"embedding": embedding}, rows)[0] @ mix_V

    jacobian_TVD = np.asarray(small.jit(jax.jacrev(mixed))(params["embedding"]))
    flow_TS = np.abs(jacobian_TVD[:, rows.tokens_BT[0]]).max(-1)
    segment_T, place = SEGMENTS[0], np.arange(8)
    same = (segment_T[:, None] == segment_T) & (segment_T > 0)
    allowed_TS = (place[None] <= place[:, None]) & same | np.eye(8, dtype=bool)
    assert np.all(flow_TS[~allowed_TS] == 0.0)
    assert np.all(flow_TS[allowed_TS] > 1e-4)


@KINDS
def test_a_document_knows_nothing_of_its_neighbours(attention, positions):
    """D01: other tokens in A, or in the padding, change no bit of B's logits; D02: nor of A's."""
    e = small.experiment(attention=attention, positions=positions)
    run, params = small.compiled_logits, small.weights(e)
    before = np.asarray(run(e, params, row(e)))[0]
    for changed, alike in (([0, 1, 2], [3, 4, 5, 6]), ([3, 4, 5, 6], [0, 1, 2]), ([7], [0, 1, 2, 3, 4, 5, 6])):
        tokens = np.arange(1, 10, dtype=np.int32)[None]
        tokens[0, changed] = 20
        after = np.asarray(run(e, params, row(e, tokens)))[0]
        assert np.array_equal(before[alike], after[alike])
        assert not np.array_equal(before[changed], after[changed])


@DTYPES
@pytest.mark.parametrize("stack", ["unroll", "scan"])
def test_padding_changes_nothing_and_all_is_finite(dtype, stack):
    """M01: rows that begin, end or consist of padding give finite logits and gradients, which its content leaves alone.

    The wholly padded row is what fills up a last batch.
    """
    e = small.experiment(dtype=dtype, stack=stack, bias=True)
    params = small.weights(e)
    segments = np.array([[0, 0, 1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 2, 2, 0, 0, 0], [0] * 9], np.int32)

    slots = np.random.default_rng(0).integers(0, 12, (3, 9)).astype(np.int32)
    other = np.where(segments == 0, 12 + slots, slots).astype(np.int32)
    compiled = small.jit(lambda rows: _gradients(e, params, rows))
    first, second = (compiled(small.pack(s, segments)) for s in (slots, other))
    for tree in (first, second):
        assert all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(tree))
    real = segments[:, :-1] > 0
    assert np.array_equal(np.asarray(first[1])[real], np.asarray(second[1])[real])
    small.assert_same(first[0], second[0])
    assert not np.asarray(second[0]["embedding"])[12:].any()


def _gradients(e, params, rows):
    def objective(params):
        logits = small.logits(e, params, rows)
        return token_sums(logits, rows.targets_BT, rows.weights_BT).objective, logits

    return jax.grad(objective, has_aux=True)(params)


@DTYPES
def test_a_query_without_a_key_gives_zeros(dtype):
    """M01: defined as zero, forward and backward, where a softmax over minus infinity would be not-a-number."""
    random = np.random.default_rng(0)
    q, k, v = (jnp.asarray(random.standard_normal(s), dtype) for s in ((2, 4, 2, 2, 4), (2, 4, 2, 4), (2, 4, 2, 4)))
    mask = causal(4, jnp.asarray([[0, 0, 1, 1], [0, 0, 0, 0]], jnp.int32))

    def mixed(q, k, v):
        out = kernels.plain(q, k, v, mask)
        return out.astype(jnp.float32).sum(), out

    gradients, out = small.jit(jax.grad(mixed, argnums=(0, 1, 2), has_aux=True))(q, k, v)
    assert not np.asarray(out[0, :2], np.float32).any() and not np.asarray(out[1], np.float32).any()
    assert np.asarray(out[0, 2:], np.float32).all()
    for gradient in gradients:
        assert np.isfinite(np.asarray(gradient, np.float32)).all()
        assert not np.asarray(gradient[0, :2], np.float32).any() and not np.asarray(gradient[1], np.float32).any()


def test_large_scores_do_not_overflow():
    """Scores of a few thousand: the largest takes it all, and nothing is not-a-number (fp32 exp ends at 88)."""
    q = jnp.full((1, 2, 1, 1, 4), 100.0)
    k = jnp.asarray([[[[100.0] * 4], [[-100.0] * 4]]])
    v = jnp.asarray([[[[1.0] * 4], [[2.0] * 4]]])
    np.testing.assert_array_equal(kernels.plain(q, k, v, causal(2)), jnp.ones((1, 2, 1, 1, 4)))


def test_the_mask_written_out():
    """Every pair of the two documents and the padding, by hand; and without segments."""
    seen = np.asarray(causal(8, jnp.asarray(SEGMENTS)).visible_BTS())[0].astype(int)
    a, b = np.tri(3, dtype=int), np.tri(4, dtype=int)
    wanted = np.zeros((8, 8), int)
    wanted[:3, :3], wanted[3:7, 3:7] = a, b
    np.testing.assert_array_equal(seen, wanted)
    np.testing.assert_array_equal(causal(5).visible_BTS()[0], np.tri(5, dtype=bool))


def test_a_mask_by_places_serves_queries_that_stand_anywhere():
    """A cached step: the query at place 3 sees places 0 to 3 of 6, whatever lies behind."""
    mask = Mask(jnp.asarray([[3]], jnp.int32), jnp.arange(6, dtype=jnp.int32)[None])
    np.testing.assert_array_equal(mask.visible_BTS(), [[[True] * 4 + [False] * 2]])


@pytest.mark.parametrize("bad", [-1, 24, 1000])
def test_an_id_out_of_range_is_loud(bad):
    """M06: an id outside the vocabulary, or a position outside the learned table, gives not-a-numbers.

    Text that comes from a user is refused before (generation.decode.check_fits, data.store); here, inside a
    compiled program, not-a-number is all that can be said, and the training step skips on it.
    """
    e = small.experiment(depth=1)
    params, rows = small.weights(e), small.batch(e, rows=1, padding=0)
    tokens, positions = rows.tokens_BT.copy(), rows.positions_BT.copy()
    tokens[0, -1] = bad
    assert np.isnan(small.compiled_logits(e, params, rows._replace(tokens_BT=tokens))[0, -1]).all()
    positions[0, -1] = 8 if bad == 24 else bad
    assert np.isnan(small.compiled_logits(e, params, rows._replace(positions_BT=positions))[0, -1]).all()
