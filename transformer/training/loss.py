"""The loss, as sums and counts that travel separately and are divided once, at the very end.

B rows, T positions, V vocabulary.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from transformer.model.transformer import logits

ROWS = 1024  # tokens whose logits are there at once in training


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
    found = [_part(kinds, x_BTD[:, t], unembedding_VD, targets_BT[:, t], weights_BT[:, t]) for t in _parts(x_BTD)]
    return jax.tree.map(lambda *parts: sum(parts[1:], parts[0]), *found)


def _part(kinds: Penalties, x_BtD: Any, unembedding_VD: Any, targets_Bt: Any, weights_Bt: Any) -> Sums:
    return token_sums(logits(x_BtD, unembedding_VD), targets_Bt, weights_Bt, **kinds._asdict())


def _parts(x_BTD: jax.Array) -> list[slice]:
    """Equal parts of the positions of about ROWS tokens in all rows together."""
    B, T, _ = x_BTD.shape
    count = max(1, min(T, -(-B * T // ROWS)))
    size = -(-T // count)
    return [slice(t, min(t + size, T)) for t in range(0, T, size)]


def _forward(kinds: Penalties, x_BTD: Any, unembedding_VD: Any, targets_BT: Any, weights_BT: Any) -> Any:
    total: Any = None
    slopes = []
    for t in _parts(x_BTD):

        def objective(x_BtD: Any, unembedding_VD: Any, t: slice = t) -> Any:
            sums = _part(kinds, x_BtD, unembedding_VD, targets_BT[:, t], weights_BT[:, t])
            return sums.objective, sums

        slope, sums = jax.grad(objective, (0, 1), has_aux=True)(x_BTD[:, t], unembedding_VD)
        slopes.append(slope[0])
        total = (sums, slope[1]) if total is None else jax.tree.map(jnp.add, total, (sums, slope[1]))
        # The next part begins when this one's logits are gone.
        x_BTD, total = jax.lax.optimization_barrier((x_BTD, total))
    sums, slope_VD = total
    return sums, (jnp.concatenate(slopes, axis=1), slope_VD)


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
