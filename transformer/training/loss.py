"""The loss, as sums and counts that travel separately and are divided once, at the very end.

B rows, T positions, V vocabulary.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from transformer.model.transformer import logits
from transformer.parallel import context
from transformer.parallel.rules import shards, spec

NUMBERS = 1 << 25  # of logits that are there at once in training: 128 MiB


class Sums(NamedTuple):
    """Sums over the target tokens of a batch; each is a float32 scalar. Divide by ``tokens``, once, globally."""

    objective: jax.Array  # what is differentiated: cross-entropy with smoothing and z-loss
    loss: jax.Array  # cross-entropy alone, in nats: what is reported, and what perplexity comes from
    correct: jax.Array  # targets that no token was more likely than
    tokens: jax.Array  # targets with weight


class Penalties(NamedTuple):
    """What the objective adds to the cross-entropy."""

    z_loss: float = 0.0
    label_smoothing: float = 0.0


def sums_in_parts(
    kinds: Penalties, x_BTD: jax.Array, unembedding_VD: jax.Array, targets_BT: jax.Array, weights_BT: jax.Array
) -> Sums:
    """``token_sums`` of the logits of ``x``, which are only ever there for some of the positions.

    The gradient of a part is taken as soon as its logits are known, and nothing is computed twice: the objective
    is a sum, so its gradient is known up to a factor before anything behind it is.
    """
    return _sums(kinds, x_BTD, unembedding_VD, targets_BT, weights_BT)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _sums(kinds: Penalties, x_BTD: Any, unembedding_VD: Any, targets_BT: Any, weights_BT: Any) -> Sums:
    found: Sums = _forward(kinds, x_BTD, unembedding_VD, targets_BT, weights_BT)[0]
    return found


def _parts(B: int, T: int, V: int) -> int:
    """Into how many equal parts a device's positions are divided: the fewest whose logits are at most NUMBERS."""
    return next(n for n in range(1, T + 1) if T % n == 0 and (n == T or B * T // n * V <= NUMBERS))


def _forward(kinds: Penalties, x_BTD: Any, unembedding_VD: Any, targets_BT: Any, weights_BT: Any) -> Any:
    B, T, _ = x_BTD.shape
    count = _parts(B // shards("batch"), T // shards("time"), unembedding_VD.shape[0] // shards("vocab"))

    def part(x_BtD: Any, targets_Bt: Any, weights_Bt: Any) -> Any:
        def objective(x_BtD: Any, unembedding_VD: Any) -> Any:
            sums = token_sums(logits(x_BtD, unembedding_VD), targets_Bt, weights_Bt, **kinds._asdict())
            return sums.objective, sums

        (slope_BtD, slope_VD), sums = jax.grad(objective, (0, 1), has_aux=True)(x_BtD, unembedding_VD)
        return (sums, slope_VD), slope_BtD

    if count == 1:
        (sums, slope_VD), slope_BTD = part(x_BTD, targets_BT, weights_BT)
        return sums, (slope_BTD, slope_VD)

    n = context.devices()  # each holds positions of a row, and gives some of its own to every part
    more = (None,) * (x_BTD.ndim - 2)

    def reshape(x: Any, shape: tuple[int, ...], *names: Any) -> Any:
        return jax.lax.reshape(x, shape, out_sharding=spec(*names, *more[: len(shape) - len(names)]))

    def split(x: Any) -> Any:
        rest = x.shape[2:]
        x_BnCt = reshape(x, (B, n, count, T // n // count, *rest), "batch", "time", None, None)
        return reshape(jnp.moveaxis(x_BnCt, 2, 0), (count, B, T // count, *rest), None, "batch", "time")

    def join(x_CBtD: Any) -> Any:
        D = x_CBtD.shape[-1]
        x_CBnt = reshape(x_CBtD, (count, B, n, T // n // count, D), None, "batch", "time", None)
        return reshape(jnp.moveaxis(x_CBnt, 0, 2), (B, T, D), "batch", "time")

    def add(total: Any, given: Any) -> Any:
        found, slope_BtD = part(*given)
        return jax.tree.map(jnp.add, total, found), slope_BtD

    # A loop, so that a part's logits are gone before the next one's are there; written out, XLA overlaps them.
    parts = tuple(map(split, (x_BTD, targets_BT, weights_BT)))
    first, slope = part(*(x[0] for x in parts))
    (sums, slope_VD), slopes = jax.lax.scan(add, first, tuple(x[1:] for x in parts))
    slopes = jnp.concatenate([slope[None], slopes])
    return sums, (join(slopes), slope_VD)


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
) -> Sums:
    """Cross-entropy of float32 logits [B, T, V] with targets [B, T], each counted ``weights`` times.

    Targets are already shifted: ``targets[b, t]`` is the token after position t (the packing owns
    the shift). z-loss is arXiv:2204.02311, section 5; label smoothing is arXiv:1512.00567, section 7.
    Nothing here gathers logits that are cut over the vocabulary: the target's logit is found by
    comparing, not by indexing.
    """
    losses_BT, log_total_BT, correct_BT = cross_entropy(logits_BTV, targets_BT)
    objective_BT = losses_BT
    if label_smoothing:
        uniform_BT = log_total_BT - logits_BTV.mean(-1)
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


def cross_entropy(logits_BTV: jax.Array, targets_BT: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Per token, [B, T]: -log softmax(logits)[target] in nats, log sum exp of the logits, and whether no logit is above
    the target's."""
    log_total_BT = jax.nn.logsumexp(logits_BTV, axis=-1)
    ids_11V = jnp.arange(logits_BTV.shape[-1], dtype=targets_BT.dtype)[None, None, :]
    hit_BTV = ids_11V == targets_BT[..., None]
    target_BT = jnp.where(hit_BTV, logits_BTV, 0.0).sum(-1)
    return log_total_BT - target_BT, log_total_BT, target_BT >= logits_BTV.max(-1)
