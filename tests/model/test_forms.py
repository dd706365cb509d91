"""The same model computed in other ways: scanned, rematerialised, in bfloat16, without jit, from a cache."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import small
from tests.model import variants
from tests.model.variants import ATTENTION
from transformer.errors import UserError
from transformer.model import attention, cache
from transformer.model.config import check
from transformer.model.grouped import Grouped
from transformer.model.masks import FAR, Mask, causal
from transformer.model.mlp import Swiglu
from transformer.model.transformer import Transformer, empty_cache
from transformer.training.state import declarations
from transformer.training.step import sum_gradients, train_step

RICH = {"depth": 2, "bias": True, "attention": variants.RICH[0], "positions": variants.RICH[1], "mlp": Swiglu(width=24)}
REMAT = ("full", "dots", "dots_without_batch")


@functools.cache
def gradients(stack="unroll", remat="none", dtype="float32"):
    """Logits, loss sums and summed gradients of one batch."""
    e = small.experiment(**RICH, stack=stack, remat=remat, dtype=dtype)
    state, rows = small.state(e), small.batch(e)
    return small.jit(lambda s, b: (small.logits(e, s.params, b), sum_gradients(e, s, b)))(state, rows)


def test_one_tree_of_weights_serves_both_stacks():
    """Scanned and unrolled models declare the same; so a checkpoint of one is one of the other."""
    scan, unroll = (declarations(small.experiment(**RICH, stack=s)) for s in ("scan", "unroll"))
    assert scan == unroll


def test_scan_is_unroll():
    assert small.farthest(gradients("scan"), gradients("unroll")) < 1e-5


@pytest.mark.parametrize(
    ("remat", "stack"),
    [("full", "scan"), ("dots", "unroll"), ("dots_without_batch", "scan")]
    + [
        pytest.param(*other, marks=pytest.mark.exhaustive)
        for other in (("full", "unroll"), ("dots", "scan"), ("dots_without_batch", "unroll"))
    ],
)
def test_rematerialising_changes_no_result(remat, stack):
    assert small.farthest(gradients(stack, remat), gradients(stack)) < 1e-6


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("stack", ["scan", "unroll"])
def test_every_remat_policy_keeps_something_else(stack, dtype):
    """Seen in what the backward pass is handed: none keeps most, full the least, dots the results of products."""
    kept = {
        remat: kept_for_backward(small.experiment(**RICH, stack=stack, remat=remat, dtype=dtype))
        for remat in ("none", *REMAT)
    }
    assert kept["none"] > kept["dots"] > kept["dots_without_batch"] > kept["full"]


@pytest.mark.parametrize("stack", ["scan", "unroll"])
def test_full_rematerialisation_keeps_no_copy_of_the_blocks_weights(stack):
    """A block of a scanned stack was once handed on to the backward pass, stacked again: a second set of weights."""
    narrow, wide = (
        kept_for_backward(small.experiment(**RICH | {"mlp": Swiglu(width=width)}, stack=stack, remat="full"))
        for width in (24, 48)
    )
    assert narrow == wide


def kept_for_backward(e):
    """How many numbers the backward pass is handed besides the weights themselves."""
    rows, params = small.batch(e), jax.tree.map(jnp.asarray, small.weights(e))
    traced = jax.make_jaxpr(lambda p: jax.tree.leaves(jax.vjp(lambda p: small.logits(e, p, rows), p)[1]))(params).jaxpr
    return sum(x.aval.size for x in traced.outvars if not any(x is given for given in traced.invars))


def test_bfloat16_is_near_float32_and_its_gradients_are_float32():
    """O09: the cast is of the computation alone."""
    low, high = gradients(dtype="bfloat16"), gradients()
    assert low[0].dtype == jnp.float32
    real = small.batch(small.experiment(**RICH)).segments_BT > 0
    assert 1e-4 < small.far(low[0][real], high[0][real]) < 0.015
    assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(low))
    for a, b in zip(jax.tree.leaves(low[1][1]), jax.tree.leaves(high[1][1]), strict=True):
        assert np.linalg.norm(a - b) < 0.03 * np.linalg.norm(b)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("kind", "positions"), ATTENTION, ids=[type(a.projection).__name__ for a, _ in ATTENTION])
def test_every_kind_of_attention_in_bfloat16_and_scanned(kind, positions):
    """Logits to 2 % of the largest; 6 % where unnormalised mixes are normed, whose rounding is then blown up."""
    near = 0.06 if attention.KINDS[type(kind.projection)].recurrent else 0.02
    found = {}
    for dtype, stack in (("float32", "unroll"), ("bfloat16", "unroll"), ("float32", "scan")):
        e = small.experiment(attention=kind, positions=positions, dtype=dtype, stack=stack)
        rows = small.batch(e)
        run = small.jit(lambda s, b, e=e: (small.logits(e, s.params, b), sum_gradients(e, s, b)))
        found[dtype, stack] = run(small.state(e), rows), rows.segments_BT > 0
    (plain, real), (low, _), (scanned, _) = found.values()
    assert small.far(low[0][real], plain[0][real]) < near
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(low))
    assert small.farthest(scanned, plain) < 1e-4


def test_blocks_compute_in_bfloat16():
    """Every product takes bfloat16, forward and backward; the logits and the gradients by weights are float32."""
    e = small.experiment(**RICH, dtype="bfloat16")
    rows, state = small.batch(e), small.state(e)
    forward = jax.make_jaxpr(lambda p: small.logits(e, p, rows))(state.params)
    # per block: query, key, value, out, gate, up, down, scores and the mix of values; and the logits
    assert [operands for operands, _ in products(forward.jaxpr)] == [("bfloat16", "bfloat16")] * (9 * 2 + 1)
    assert forward.out_avals[0].dtype == jnp.float32
    step = jax.make_jaxpr(lambda s: sum_gradients(e, s, rows))(state)
    of_weights = [operands for operands, size in products(step.jaxpr) if size == 16 * 24]  # of both MLPs and the table
    assert of_weights == [("bfloat16", "bfloat16")] * (3 * 2 + 1)
    assert all(x.dtype == jnp.float32 for x in step.out_avals)


def products(jaxpr):
    """Of every product of a traced program the operands' types and how many numbers come out."""
    for e in jaxpr.eqns:
        if e.primitive.name == "dot_general":
            yield tuple(x.aval.dtype.name for x in e.invars), e.outvars[0].aval.size
        for inner in jax.tree.leaves(list(e.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            if hasattr(inner := getattr(inner, "jaxpr", inner), "eqns"):
                yield from products(inner)


def test_without_jit_the_model_gives_the_same():
    """What the page on debugging promises: `jax.disable_jit` runs everything, line by line."""
    e = small.experiment(depth=1, width=8, heads=2, context=4, stack="scan")
    params, rows = jax.tree.map(jnp.asarray, (small.weights(e), small.batch(e, rows=2, padding=1)))
    with jax.disable_jit():
        plain = small.logits(e, params, rows)
    assert small.far(plain, small.compiled_logits(e, params, rows)) < 1e-5


@pytest.mark.exhaustive
def test_without_jit_a_step_gives_the_same():
    e = small.experiment(depth=1, width=8, heads=2, context=4, train={"batch": 2})
    state, rows = jax.tree.map(jnp.asarray, (small.state(e), small.batch(e, padding=1)))
    compiled = small.jit(train_step, static_argnums=0)(e, state, rows)
    with jax.disable_jit():
        plain = train_step(e, state, rows)
    for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(compiled), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("kind", "positions"), ATTENTION, ids=[f"{type(a.projection).__name__}-{type(p).__name__}" for a, p in ATTENTION]
)
def test_cached_logits_are_the_uncached_ones_at_every_step(kind, positions):
    """A prompt of 3 and one of 5 tokens, then one token at a time; each row equal to its own whole text."""
    stack = "scan" if ATTENTION.index((kind, positions)) % 2 else "unroll"
    e = small.experiment(attention=kind, positions=positions, stack=stack)
    params, rows, places = jax.tree.map(jnp.asarray, small.weights(e)), 2, 8
    random = np.random.default_rng(0)
    text = random.integers(0, e.vocab_size, (rows, places)).astype(np.int32)
    index = np.tile(np.arange(places, dtype=np.int32), (rows, 1))
    model = Transformer(e.model, e.vocab_size)
    whole = np.asarray(small.compiled_logits(e, params, small.pack(*_one_document(text))))

    @small.jit
    def read(tokens, index, to, held):
        mask = Mask(index, jnp.arange(places, dtype=jnp.int32)[None])
        return model.apply({"params": params}, tokens, index, mask, held, to)

    lengths = np.array([3, 5])
    to = np.where(index[:, :5] < lengths[:, None], index[:, :5], FAR)  # padding is written nowhere
    held = empty_cache(e.model, rows, places)
    found, held = read(text[:, :5], index[:, :5], to, held)
    for b, n in enumerate(lengths):
        assert small.far(found[b, :n], whole[b, :n]) < 1e-5
        places_kept = attention.KINDS[type(kind.projection)].recurrent is None
        for kept in [x for x in jax.tree.leaves(held) if x.size and places_kept]:  # of one block, or of all
            KSH = np.asarray(kept).reshape(-1, *kept.shape[-4:])[:, b]
            assert KSH[..., :n, :].any(axis=(1, 3)).all() and not KSH[..., n:, :].any()
    for step in range(3):
        at = (lengths + step)[:, None].astype(np.int32)
        found, held = read(np.take_along_axis(text, at, 1), at, at, held)
        for b in range(rows):
            assert small.far(found[b, 0], whole[b, at[b, 0]]) < 1e-5


def _one_document(text):
    slots = np.concatenate([text, text[:, :1]], 1)
    return slots, np.ones_like(slots)


def test_writing_past_the_end_of_a_cache_writes_nothing():
    """M06: a buffer of 4 and a write at 6: not clamped to slot 3, as a dynamic update would; nor any other slot."""
    held = cache.allocate(1, 4, 3, 2, jnp.float32)
    assert held.k_BKSH.shape == held.v_BKSH.shape == (1, 3, 4, 2)
    new = jnp.asarray(np.random.default_rng(0).normal(size=(1, 2, 3, 2)), jnp.float32)
    written = cache.write(held, jnp.asarray([[2, 6]]), new, 2 * new)
    wanted_BSKH = np.zeros((1, 4, 3, 2), np.float32)
    wanted_BSKH[0, 2] = new[0, 0]
    k, v = cache.read(written)
    np.testing.assert_array_equal(k, wanted_BSKH)
    np.testing.assert_array_equal(v, 2 * wanted_BSKH)
    np.testing.assert_array_equal(written.k_BKSH, wanted_BSKH.transpose(0, 2, 1, 3))


def test_only_the_asked_position_is_unembedded():
    e = small.experiment()
    params, rows = jax.tree.map(jnp.asarray, (small.weights(e), small.batch(e, rows=2, padding=0)))
    mask = causal(8, rows.segments_BT)
    model = Transformer(e.model, e.vocab_size)
    ask = small.jit(
        lambda only_B: model.apply({"params": params}, rows.tokens_BT, rows.positions_BT, mask, only_B=only_B)
    )
    one, _ = ask(jnp.asarray([1, 6]))
    everything = small.compiled_logits(e, params, rows)
    assert one.shape == (2, 1, e.vocab_size)
    assert small.far(one[:, 0], np.asarray(everything)[[0, 1], [1, 6]]) < 1e-6


@pytest.mark.parametrize("kv", [0, 3, 5])
def test_heads_that_do_not_divide_are_refused(kv):
    """Four query heads: a number of key/value heads that does not divide them is named with those that do."""
    e = small.experiment(attention=attention.Attention(projection=Grouped(kv_heads=kv)))
    with pytest.raises(UserError, match=rf"kv_heads: 4 query heads .* over {kv} .*possible: 1, 2, 4"):
        check(e.model)
