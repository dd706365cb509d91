"""Attention in memory linear in the context: one block of queries at a time, forward and backward.

Online softmax: Milakov and Gimelshein, arXiv:1805.02867; blocks with recomputation in the backward pass:
FlashAttention, arXiv:2205.14135, algorithms 1 and 4. Short contexts are worked through in a loop that is
written out, each block of queries against all the keys before its end; long ones in loops of fixed blocks,
where pairs of blocks that the mask hides are skipped.

B rows, K key/value heads, M heads in all rows, G query heads per key/value head, T query positions, S key
positions, t and s positions of one block, R rows of all G and t, H width of one head (that of values may be another),
Q blocks of queries. Scores and sums are float32.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from transformer.model.masks import BIG, Mask
from transformer.model.scores import NOTHING, Scoring, alibi, capped

KEPT = "attention"  # by this name a rematerialisation policy can keep what the backward pass cannot do without
WRITTEN_OUT = 1024  # the longest context whose loop is written out: beyond, compiling would take too long
BLOCK = 512  # positions of a block in longer contexts


Take = Callable[[jax.Array], jax.Array]  # some places out of [B or 1, T]


class Sums(NamedTuple):
    """Of the keys seen so far: the largest score, and sums of exp(score - largest), alone and times the values."""

    top_MGt1: jax.Array
    total_MGt1: jax.Array
    mixed_MGtH: jax.Array


def _dot(a: jax.Array, b: jax.Array) -> jax.Array:
    """Products of matrices in memory order, float32: what is small is transposed before, tables never."""
    return jnp.matmul(a, b, preferred_element_type=jnp.float32)


def _matrix(x_MGtH: jax.Array) -> jax.Array:
    """[M, G t, H]."""
    M, G, t, H = x_MGtH.shape
    return x_MGtH.reshape(M, G * t, H)


def _scores(q_MGtH: jax.Array, k_MsH: jax.Array, part: Mask, how: Scoring) -> tuple[jax.Array, jax.Array | None]:
    """Masked scores [M, G, t, s], and the slope of their cap, if they have one."""
    M, G, t, _ = q_MGtH.shape
    # Written out once (the barrier), not in every pass over a table: 0 where a query sees a key, -BIG elsewhere.
    hidden_Bts = jax.lax.optimization_barrier(jnp.where(part.visible_BTS(), 0.0, -BIG))
    B, _, s = hidden_Bts.shape
    scores_BKGts = _dot(_matrix(q_MGtH), k_MsH.transpose(0, 2, 1)).reshape(B, M // B, G, t, s)
    slope_MGts = None
    if how.soft_cap is not None:
        scores_BKGts, slope_BKGts = capped(scores_BKGts, how.soft_cap)
        slope_MGts = slope_BKGts.reshape(M, G, t, s)
    if how.slopes_KG is not None:
        K = how.slopes_KG.shape[0]
        scores_BKGts = scores_BKGts.reshape(-1, K, G, t, s) + alibi(part.distance_BTS(), how.slopes_KG)
        hidden_Bts = jnp.broadcast_to(hidden_Bts, (M // K, t, s))
    return (scores_BKGts + hidden_Bts[:, None, None]).reshape(M, G, t, s), slope_MGts


def _visit(sums: Sums | None, q_MGtH: jax.Array, k_MsH: jax.Array, v_MsH: jax.Array, part: Mask, how: Scoring) -> Sums:
    """The sums with a block of keys more."""
    scores_MGts, _ = _scores(q_MGtH, k_MsH, part, how)
    top_MGt1 = jnp.maximum(scores_MGts.max(-1, keepdims=True), -BIG / 10)  # hidden keys weigh exactly nothing
    if sums is not None:
        top_MGt1 = jnp.maximum(top_MGt1, sums.top_MGt1)
    weights_MGts = jnp.exp(scores_MGts - top_MGt1)
    total_MGt1 = weights_MGts.sum(-1, keepdims=True)
    mixed_MGtH = _dot(_matrix(weights_MGts).astype(v_MsH.dtype), v_MsH).reshape(*q_MGtH.shape[:3], -1)
    if sums is not None:
        before_MGt1 = jnp.exp(sums.top_MGt1 - top_MGt1)
        total_MGt1 = total_MGt1 + sums.total_MGt1 * before_MGt1
        mixed_MGtH = mixed_MGtH + sums.mixed_MGtH * before_MGt1
    return Sums(top_MGt1, total_MGt1, mixed_MGtH)


def _finish(sums: Sums, dtype: Any, how: Scoring) -> tuple[jax.Array, jax.Array]:
    """Mixed values [M, G, t, H], zero where no key is seen, and log sum exp of the scores [M, G, t, 1]."""
    some_MGt1 = sums.total_MGt1 > 0
    total_MGt1 = jnp.where(some_MGt1, sums.total_MGt1, 1)
    log_total_MGt1 = sums.top_MGt1 + jnp.log(total_MGt1)
    mixed_MGtH = sums.mixed_MGtH / total_MGt1
    if how.sinks_KG is not None:
        with_sink_MGt1 = jnp.logaddexp(log_total_MGt1, _of_heads(how.sinks_KG, mixed_MGtH))
        mixed_MGtH = mixed_MGtH * jnp.exp(log_total_MGt1 - with_sink_MGt1)
        log_total_MGt1 = with_sink_MGt1
    return mixed_MGtH.astype(dtype), jnp.where(some_MGt1, log_total_MGt1, 0)


def _of_heads(x_KG: jax.Array, like_MGtH: jax.Array) -> jax.Array:
    """A number of each head for the heads of all rows, [M, G, 1, 1]."""
    M, G = like_MGtH.shape[:2]
    return jnp.broadcast_to(x_KG[None], (M // x_KG.shape[0], *x_KG.shape)).reshape(M, G, 1, 1)


class Saved(NamedTuple):
    """What the backward pass needs of one block of queries: the gradient of its result, and two sums."""

    q_MGtH: jax.Array
    given_MGtH: jax.Array
    delta_MGt1: jax.Array  # sum of result times its gradient
    total_MGt1: jax.Array  # log sum exp


def _revisit(
    saved: Saved, k_MsH: jax.Array, v_MsH: jax.Array, part: Mask, how: Scoring
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Float32 gradients of a block of queries [M, G, t, H], and of keys and values [M, H, s], by each other."""
    q_MGtH, given_MGtH, delta_MGt1, total_MGt1 = saved
    dtype = q_MGtH.dtype
    scores_MGts, cap_MGts = _scores(q_MGtH, k_MsH, part, how)
    weights_MGts = jnp.exp(scores_MGts - total_MGt1)
    back_MGts = _dot(_matrix(given_MGtH), v_MsH.transpose(0, 2, 1)).reshape(weights_MGts.shape)
    slope_MGts = weights_MGts * (back_MGts - delta_MGt1)
    slope_MRs = _matrix((slope_MGts if cap_MGts is None else slope_MGts * cap_MGts).astype(dtype))
    return (
        _dot(slope_MRs, k_MsH).reshape(q_MGtH.shape),
        _dot(_matrix(q_MGtH).transpose(0, 2, 1), slope_MRs),
        _dot(_matrix(given_MGtH).transpose(0, 2, 1), _matrix(weights_MGts).astype(dtype)),
    )


# Short contexts


def _ranges(queries: int, keys: int, mask: Mask) -> Iterator[tuple[slice, slice, Mask]]:
    """Blocks of queries, each with the keys that it can see and the mask of both."""
    size = 128
    for start in range(0, queries, size):
        end = min(start + size, queries)
        t, s = slice(start, end), slice(0, keys)
        if mask.ordered:
            s = slice(max(0, start - mask.window + 1) if mask.window else 0, min(end, keys))
        yield t, s, mask.slice(_part(t), _part(s))


def _part(places: slice) -> Take:
    return lambda x_BT: x_BT[:, places]


def _short_forward(
    q_MGTH: jax.Array, k_MSH: jax.Array, v_MSH: jax.Array, mask: Mask, how: Scoring
) -> tuple[jax.Array, jax.Array]:
    parts = []
    for t, s, part in _ranges(q_MGTH.shape[2], k_MSH.shape[1], mask):
        sums = _visit(None, q_MGTH[:, :, t], k_MSH[:, s], v_MSH[:, s], part, how)
        parts.append(_finish(sums, v_MSH.dtype, how))
    return tuple(jnp.concatenate(x, axis=2) for x in zip(*parts, strict=True))  # type: ignore[return-value]


def _short_backward(
    saved: Saved, k_MSH: jax.Array, v_MSH: jax.Array, mask: Mask, how: Scoring
) -> tuple[jax.Array, ...]:
    dq = []
    dk_MHS, dv_MHS = (jnp.zeros(x.transpose(0, 2, 1).shape, jnp.float32) for x in (k_MSH, v_MSH))
    for t, s, part in _ranges(saved.q_MGtH.shape[2], k_MSH.shape[1], mask):
        some = Saved(*(x[:, :, t] for x in saved))
        dq_MGtH, dk_MHs, dv_MHs = _revisit(some, k_MSH[:, s], v_MSH[:, s], part, how)
        dq.append(dq_MGtH)
        dk_MHS, dv_MHS = dk_MHS.at[:, :, s].add(dk_MHs), dv_MHS.at[:, :, s].add(dv_MHs)
    return jnp.concatenate(dq, axis=2), dk_MHS, dv_MHS


# Long contexts


def _blocks(x: jax.Array, axis: int) -> jax.Array:
    """[..., n * BLOCK, ...] -> [n, ..., BLOCK, ...]."""
    shape = (*x.shape[:axis], -1, BLOCK, *x.shape[axis + 1 :])
    return jnp.moveaxis(x.reshape(shape), axis, 0)


def _whole(x: jax.Array, axis: int) -> jax.Array:
    """The inverse of ``_blocks``."""
    x = jnp.moveaxis(x, 0, axis)
    return x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])


def _at(number: jax.Array) -> Take:
    return lambda x_BT: jax.lax.dynamic_slice_in_dim(x_BT, number * BLOCK, BLOCK, axis=1)


def _long_forward(
    q_MGTH: jax.Array, k_MSH: jax.Array, v_MSH: jax.Array, mask: Mask, how: Scoring
) -> tuple[jax.Array, jax.Array]:
    live_QK, keys = mask.live(BLOCK), (_blocks(k_MSH, 1), _blocks(v_MSH, 1))

    def queries(block: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        i, q_MGtH = block
        top_MGt1 = jnp.full((*q_MGtH.shape[:3], 1), -BIG, jnp.float32)
        mixed_MGtH = jnp.zeros((*q_MGtH.shape[:3], v_MSH.shape[-1]), jnp.float32)
        start = Sums(top_MGt1, jnp.zeros_like(top_MGt1), mixed_MGtH)

        def visit(j: jax.Array, sums: Sums) -> Sums:
            k_MsH, v_MsH = keys[0][j], keys[1][j]
            return jax.lax.cond(
                live_QK[i, j],
                lambda: _visit(sums, q_MGtH, k_MsH, v_MsH, mask.slice(_at(i), _at(j)), how),
                lambda: sums,
            )

        return _finish(jax.lax.fori_loop(0, live_QK.shape[1], visit, start), v_MSH.dtype, how)

    mixed, total = jax.lax.map(queries, (jnp.arange(live_QK.shape[0]), _blocks(q_MGTH, 2)))
    return _whole(mixed, 2), _whole(total, 2)


def _long_backward(saved: Saved, k_MSH: jax.Array, v_MSH: jax.Array, mask: Mask, how: Scoring) -> tuple[jax.Array, ...]:
    live_QK, k, v = mask.live(BLOCK), _blocks(k_MSH, 1), _blocks(v_MSH, 1)
    zeros = tuple(jnp.zeros(x.transpose(0, 1, 3, 2).shape, jnp.float32) for x in (k, v))

    def queries(carry: Any, block: tuple[jax.Array, Saved]) -> Any:
        i, part = block

        def visit(j: jax.Array, carry: Any) -> Any:
            def add(dq_MGtH: jax.Array, dk: jax.Array, dv: jax.Array) -> Any:
                found = _revisit(part, k[j], v[j], mask.slice(_at(i), _at(j)), how)
                return dq_MGtH + found[0], dk.at[j].add(found[1]), dv.at[j].add(found[2])

            return jax.lax.cond(live_QK[i, j], add, lambda *same: same, *carry)

        start = (jnp.zeros(part.q_MGtH.shape, jnp.float32), *carry)
        dq_MGtH, *carry = jax.lax.fori_loop(0, live_QK.shape[1], visit, start)
        return tuple(carry), dq_MGtH

    parts = Saved(*(_blocks(x, 2) for x in saved))
    (dk, dv), dq = jax.lax.scan(queries, zeros, (jnp.arange(live_QK.shape[0]), parts))
    return _whole(dq, 2), _whole(dk, 2), _whole(dv, 2)


# Both


def _heads(x_BTKGH: jax.Array) -> jax.Array:
    """[B, T, K, G, H] -> [M, G, T, H]."""
    B, T, K, G, H = x_BTKGH.shape
    return x_BTKGH.transpose(0, 2, 3, 1, 4).reshape(B * K, G, T, H)


def _rows(x_MGTH: jax.Array, B: int) -> jax.Array:
    M, G, T, H = x_MGTH.shape
    return x_MGTH.reshape(B, M // B, G, T, H).transpose(0, 3, 1, 2, 4)


def _is_short(q_MGTH: jax.Array, k_MSH: jax.Array) -> bool:
    return max(q_MGTH.shape[2], k_MSH.shape[1]) <= WRITTEN_OUT


@jax.custom_vjp
def _attend(q_MGTH: jax.Array, k_MSH: jax.Array, v_MSH: jax.Array, mask: Mask, how: Scoring) -> jax.Array:
    return _forward(q_MGTH, k_MSH, v_MSH, mask, how)[0]


def _forward(q_MGTH: jax.Array, k_MSH: jax.Array, v_MSH: jax.Array, mask: Mask, how: Scoring) -> tuple[jax.Array, Any]:
    run = _short_forward if _is_short(q_MGTH, k_MSH) else _long_forward
    mixed_MGTH, total_MGT1 = checkpoint_name(run(q_MGTH, k_MSH, v_MSH, mask, how), KEPT)
    return mixed_MGTH, (q_MGTH, k_MSH, v_MSH, mask, how, mixed_MGTH, total_MGT1)


def _backward(kept: Any, given_MGTH: jax.Array) -> tuple[Any, ...]:
    q_MGTH, k_MSH, v_MSH, mask, how, mixed_MGTH, total_MGT1 = kept
    delta_MGT1 = (given_MGTH.astype(jnp.float32) * mixed_MGTH).sum(-1, keepdims=True)
    run = _short_backward if _is_short(q_MGTH, k_MSH) else _long_backward
    dq, dk_MHS, dv_MHS = run(Saved(q_MGTH, given_MGTH, delta_MGT1, total_MGT1), k_MSH, v_MSH, mask, how)
    dk_MSH, dv_MSH = dk_MHS.transpose(0, 2, 1), dv_MHS.transpose(0, 2, 1)
    dhow = jax.tree.map(jnp.zeros_like, how)  # ALiBi's slopes are constants
    if how.sinks_KG is not None:  # a sink's weight, and that nothing comes of it
        weight_MGT1 = jnp.exp(_of_heads(how.sinks_KG, mixed_MGTH) - total_MGT1)
        slope_MG = -(weight_MGT1 * delta_MGT1).sum((2, 3))
        dhow = dataclasses.replace(dhow, sinks_KG=slope_MG.reshape(-1, *how.sinks_KG.shape).sum(0))
    return dq.astype(q_MGTH.dtype), dk_MSH.astype(k_MSH.dtype), dv_MSH.astype(v_MSH.dtype), None, dhow


_attend.defvjp(_forward, _backward)


def blockwise(
    q_BTKGH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, mask: Mask, how: Scoring = NOTHING
) -> jax.Array:
    """softmax(q k^T / sqrt(H)) v, [B, T, K, G, H], as `kernels.plain` gives it. All on one device: see `kernels`."""
    B, T, _, _, H = q_BTKGH.shape
    S = k_BSKH.shape[1]
    q_MGTH = _heads(q_BTKGH) * np.asarray(H**-0.5, q_BTKGH.dtype)
    k_MSH, v_MSH = (_heads(x[:, :, :, None])[:, 0] for x in (k_BSKH, v_BSKH))
    if max(T, S) > WRITTEN_OUT:  # up to whole blocks; what is added is hidden, and cut off again
        pad_T, pad_S = -T % BLOCK, -S % BLOCK
        q_MGTH = jnp.pad(q_MGTH, ((0, 0), (0, 0), (0, pad_T), (0, 0)))
        k_MSH, v_MSH = (jnp.pad(x, ((0, 0), (0, pad_S), (0, 0))) for x in (k_MSH, v_MSH))
        mask = mask.pad(pad_T, pad_S)
    return _rows(_attend(q_MGTH, k_MSH, v_MSH, mask, how)[:, :, :T], B)
