"""The loss, as sums and counts that travel separately and are divided once, at the very end.

B rows, T positions, V vocabulary.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Sums(NamedTuple):
    """Sums over the target tokens of a batch; each is a float32 scalar. Divide by ``tokens``, once, globally."""

    objective: jax.Array  # what is differentiated: cross-entropy with smoothing and z-loss
    loss: jax.Array  # cross-entropy alone, in nats: what is reported, and what perplexity comes from
    correct: jax.Array  # targets that were the most likely token
    tokens: jax.Array  # targets with weight


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
    losses_BT, log_total_BT = cross_entropy(logits_BTV, targets_BT)
    objective_BT = losses_BT
    if label_smoothing:
        uniform_BT = log_total_BT - logits_BTV.mean(-1)
        objective_BT = (1 - label_smoothing) * losses_BT + label_smoothing * uniform_BT
    if z_loss:
        objective_BT = objective_BT + z_loss * jnp.square(log_total_BT)
    correct_BT = jnp.argmax(logits_BTV, -1) == targets_BT
    # A target without weight adds exactly nothing, whatever its logits hold.
    counted_BT = weights_BT > 0
    return Sums(
        objective=jnp.where(counted_BT, objective_BT * weights_BT, 0.0).sum(),
        loss=jnp.where(counted_BT, losses_BT * weights_BT, 0.0).sum(),
        correct=jnp.where(counted_BT, correct_BT * weights_BT, 0.0).sum(),
        tokens=weights_BT.sum(),
    )


def cross_entropy(logits_BTV: jax.Array, targets_BT: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Per token: -log softmax(logits)[target] in nats, and log sum exp of the logits; both [B, T]."""
    log_total_BT = jax.nn.logsumexp(logits_BTV, axis=-1)
    ids_11V = jnp.arange(logits_BTV.shape[-1], dtype=targets_BT.dtype)[None, None, :]
    hit_BTV = ids_11V == targets_BT[..., None]
    return log_total_BT - jnp.where(hit_BTV, logits_BTV, 0.0).sum(-1), log_total_BT
