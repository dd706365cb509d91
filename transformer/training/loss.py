"""The loss, as sums and counts that travel separately and are divided once, at the very end.

B rows, T positions, V vocabulary.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from transformer.model.moe import Moe, Routing
from transformer.model.transformer import logits
from transformer.parallel.rules import each_device, mesh_axes, put, spec

NUMBERS = 1 << 26  # of logits that are on a device at once in training: 256 MiB


class Sums(NamedTuple):
    """Sums over the target tokens of a batch; each is a float32 scalar. Divide by ``tokens``, once, globally."""

    objective: jax.Array  # what is differentiated: cross-entropy with smoothing and z-loss
    loss: jax.Array  # cross-entropy alone, in nats: what is reported, and what perplexity comes from
    correct: jax.Array  # targets that no token was more likely than
    tokens: jax.Array  # targets with weight
    routing: Routing | None = None  # of a mixture of experts: each block's, stacked


class Penalties(NamedTuple):
    """What the objective adds to the cross-entropy, and the cap of the logits."""

    z_loss: float = 0.0
    label_smoothing: float = 0.0
    soft_cap: float | None = None


def sums_in_parts(
    kinds: Penalties, x_BTD: jax.Array, unembedding_VD: jax.Array, targets_BT: jax.Array, weights_BT: jax.Array
) -> Sums:
    """``token_sums`` of the logits of ``x``, which are only ever there for some of the positions.

    The gradient of a part is taken as soon as its logits are known, and nothing is computed twice: the objective
    is a sum, so its gradient is known up to a factor before anything behind it is.
    """
    x_BTD, unembedding_VD = put(x_BTD, "batch", "time", "stream"), put(unembedding_VD, "vocab", "width")
    targets_BT, weights_BT = put(targets_BT, "batch", "time"), put(weights_BT, "batch", "time")
    return _sums(kinds, x_BTD, unembedding_VD, targets_BT, weights_BT)


def balanced(moe: Moe, sums: Sums, routing: Routing) -> Sums:
    """The sums with every block's penalties for uneven loads and large logits of the router; means over tokens."""
    penalties = moe.balance * routing.uneven.sum() + moe.z_loss * routing.z.sum()
    return sums._replace(objective=sums.objective + penalties, routing=routing)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _sums(kinds: Penalties, x_BTD: Any, unembedding_VD: Any, targets_BT: Any, weights_BT: Any) -> Sums:
    found: Sums = _forward(kinds, x_BTD, unembedding_VD, targets_BT, weights_BT)[0]
    return found


def _parts(B: int, T: int, V: int) -> int:
    """Into how many equal parts the positions are divided: the fewest whose logits are at most NUMBERS."""
    return next(n for n in range(1, T + 1) if T % n == 0 and (n == T or B * T // n * V <= NUMBERS))


def _forward(kinds: Penalties, x_BTD: Any, unembedding_VD: Any, targets_BT: Any, weights_BT: Any) -> Any:
    """The sums, and the gradients of the objective by ``x`` and by the unembedding.

    On a mesh each device works through its own positions: the unembedding is gathered over its width once, before
    the first part, and the gradients of all devices are added up once, after the last.
    """
    rows, table = spec("batch", "time", "stream"), spec("vocab", "width")
    if rows is None or table is None:
        return _local(kinds, x_BTD, unembedding_VD, targets_BT, weights_BT)
    apart = mesh_axes("batch") + mesh_axes("time")  # devices along these have other positions

    def one(x_BTD: Any, shard_VD: Any, targets_BT: Any, weights_BT: Any) -> Any:
        table_VD = shard_VD.astype(x_BTD.dtype)
        for axis in reversed(mesh_axes("width")):
            table_VD = jax.lax.all_gather(table_VD, axis, axis=1, tiled=True)
        same = tuple(axis for axis in apart if axis not in mesh_axes("width"))
        table_VD = jax.lax.pcast(table_VD, same, to="varying")  # each device's gradient is its own until the end
        own = (x_BTD, table_VD, targets_BT, weights_BT)
        gathered = table_VD.shape != shard_VD.shape
        sums, (slope_BTD, slope_VD) = _local(kinds, *own, mesh_axes("vocab"), gathered)
        slope_VD = slope_VD.astype(x_BTD.dtype)  # in which the gradients of all weights are added up
        for axis in mesh_axes("width"):
            slope_VD = jax.lax.psum_scatter(slope_VD, axis, scatter_dimension=1, tiled=True)
        slope_VD = jax.lax.psum(slope_VD, same).astype(shard_VD.dtype)
        return jax.lax.psum(sums, apart), (slope_BTD, slope_VD)

    flat = spec("batch", "time")
    specs: Any = {"in_specs": (rows, table, flat, flat), "out_specs": (PartitionSpec(), (rows, table))}
    sums, slopes_both = each_device(one, **specs)(x_BTD, unembedding_VD, targets_BT, weights_BT)
    # Each device cuts out its part of the sum before anything behind the loss is begun: the whole need not be kept.
    return sums, jax.lax.optimization_barrier(slopes_both)


def _local(
    kinds: Penalties,
    x_BTD: Any,
    unembedding_VD: Any,
    targets_BT: Any,
    weights_BT: Any,
    vocab: tuple[str, ...] = (),
    gathered: bool = False,
) -> Any:
    """``_forward`` of one device's positions; ``gathered`` says that its unembedding is a copy made for the loss."""
    B, T, _ = x_BTD.shape
    count = _parts(B, T, unembedding_VD.shape[0])

    def part(x_BtD: Any, targets_Bt: Any, weights_Bt: Any) -> Any:
        def scores(x_BtD: Any, unembedding_VD: Any) -> Any:
            return logits(x_BtD, unembedding_VD, kinds.soft_cap)

        logits_BtV, back = jax.vjp(scores, x_BtD, unembedding_VD)
        penalties: Any = {"z_loss": kinds.z_loss, "label_smoothing": kinds.label_smoothing, "vocab": vocab}
        sums = token_sums(logits_BtV, targets_Bt, weights_Bt, **penalties)
        by_logits = functools.partial(slopes, kinds, vocab=vocab)
        given: Any = (logits_BtV, log_total(logits_BtV, vocab), targets_Bt, weights_Bt)
        slope_BtD, slope_VD = back(by_logits(*given))
        if gathered:
            # The copy of the unembedding can go before its gradient, which is as large, is begun; and the slopes by
            # the logits, as large as they, are computed again rather than kept as well.
            x_BtD, given, _ = jax.lax.optimization_barrier((x_BtD, given, slope_BtD))
            _, by_table = jax.vjp(functools.partial(scores, x_BtD), unembedding_VD)
            (slope_VD,) = by_table(by_logits(*given))
        return (sums, slope_VD), slope_BtD

    if count == 1:
        (sums, slope_VD), slope_BTD = part(x_BTD, targets_BT, weights_BT)
        return sums, (slope_BTD, slope_VD)

    def split(x: Any) -> Any:
        return jnp.moveaxis(x.reshape(B, count, T // count, *x.shape[2:]), 1, 0)

    def add(total: Any, given: Any) -> Any:
        found, slope_BtD = part(*given)
        return jax.tree.map(jnp.add, total, found), slope_BtD

    # A loop, so that a part's logits are gone before the next one's are there; written out, XLA overlaps them.
    parts = tuple(map(split, (x_BTD, targets_BT, weights_BT)))
    first, slope = part(*(x[0] for x in parts))
    (sums, slope_VD), found = jax.lax.scan(add, first, tuple(x[1:] for x in parts))
    found = jnp.concatenate([slope[None], found])
    return sums, (jnp.moveaxis(found, 0, 1).reshape(x_BTD.shape), slope_VD)


def _backward(kinds: Penalties, kept: Any, given: Sums) -> Any:
    slope_BTD, slope_VD = kept
    factor = given.objective  # the other sums are for people, and have no gradient
    return (slope_BTD * factor.astype(slope_BTD.dtype), slope_VD * factor, None, None)


_sums.defvjp(_forward, _backward)


def token_sums(
    logits_BTV: jax.Array,
    targets_BT: jax.Array,
    weights_BT: jax.Array,
    *,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
    vocab: tuple[str, ...] = (),
) -> Sums:
    """Cross-entropy of float32 logits [B, T, V] with targets [B, T], each counted ``weights`` times.

    Targets are already shifted: ``targets[b, t]`` is the token after position t (the packing owns
    the shift). z-loss is arXiv:2204.02311, section 5; label smoothing is arXiv:1512.00567, section 7.
    Nothing here gathers logits that are cut over the vocabulary: the target's logit is found by
    comparing, not by indexing. Inside a shard_map ``vocab`` names the mesh axes over which it is cut.
    """
    losses_BT, log_total_BT, correct_BT = cross_entropy(logits_BTV, targets_BT, vocab)
    objective_BT = losses_BT
    if label_smoothing:
        uniform_BT = log_total_BT - jax.lax.pmean(logits_BTV.mean(-1), vocab)
        objective_BT = (1 - label_smoothing) * losses_BT + label_smoothing * uniform_BT
    if z_loss:
        objective_BT = objective_BT + z_loss * jnp.square(log_total_BT)
    # A target without weight adds exactly nothing, whatever its logits hold.
    counted_BT = weights_BT > 0
    return Sums(
        objective=jnp.where(counted_BT, objective_BT * weights_BT, 0.0).sum(),
        loss=jnp.where(counted_BT, losses_BT * weights_BT, 0.0).sum(),
        correct=jnp.where(counted_BT, correct_BT * weights_BT, 0.0).sum(),
        tokens=weights_BT.sum(),
    )


def cross_entropy(
    logits_BTV: jax.Array, targets_BT: jax.Array, vocab: tuple[str, ...] = ()
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Per token, [B, T]: -log softmax(logits)[target] in nats, log sum exp of the logits, and whether no logit is above
    the target's. ``vocab`` as in ``token_sums``."""
    total_BT = log_total(logits_BTV, vocab)
    hit_BTV = _hits(logits_BTV, targets_BT, vocab)
    target_BT = jax.lax.psum(jnp.where(hit_BTV, logits_BTV, 0.0).sum(-1), vocab)
    largest_BT = jax.lax.pmax(jax.lax.stop_gradient(logits_BTV.max(-1)), vocab)
    return total_BT - target_BT, total_BT, target_BT >= largest_BT


def log_total(logits_BTV: jax.Array, vocab: tuple[str, ...] = ()) -> jax.Array:
    """log sum exp of the logits, [B, T]."""
    total_BT = jax.nn.logsumexp(logits_BTV, axis=-1)
    if not vocab:
        return total_BT
    top_BT = jax.lax.pmax(jax.lax.stop_gradient(total_BT), vocab)
    return top_BT + jnp.log(jax.lax.psum(jnp.exp(total_BT - top_BT), vocab))


def _hits(logits_BTV: jax.Array, targets_BT: jax.Array, vocab: tuple[str, ...]) -> jax.Array:
    """Which logit is that of the target, bool [B, T, V]."""
    V = logits_BTV.shape[-1]
    first = jax.lax.axis_index(vocab) * V if vocab else 0
    return first + jnp.arange(V, dtype=targets_BT.dtype)[None, None, :] == targets_BT[..., None]


def slopes(
    kinds: Penalties, logits_BTV: Any, total_BT: Any, targets_BT: Any, weights_BT: Any, vocab: tuple[str, ...] = ()
) -> jax.Array:
    """The gradient of ``token_sums(...).objective`` by the logits, [B, T, V]; ``total`` is their ``log_total``.

    The softmax minus what it should be: the target, or with smoothing a little of every token.
    """
    V = logits_BTV.shape[-1] * jax.lax.psum(1, vocab)
    softmax_BTV = jnp.exp(logits_BTV - total_BT[..., None])
    wanted_BTV = jnp.where(_hits(logits_BTV, targets_BT, vocab), 1 - kinds.label_smoothing, 0.0)
    wanted_BTV = wanted_BTV + kinds.label_smoothing / V
    steeper_BT = 1 + 2 * kinds.z_loss * total_BT
    slopes_BTV = (steeper_BT[..., None] * softmax_BTV - wanted_BTV) * weights_BT[..., None]
    return jnp.where((weights_BT > 0)[..., None], slopes_BTV, 0.0)
