"""From logits to the next token: which tokens may be drawn, and the draw.

B rows, V vocabulary. Order: repetition penalty, temperature, top-k, top-p, min-p, draw. Each filter
works on what the one before it left, renormalised.
"""

import math

import jax
import jax.numpy as jnp

from transformer.errors import UserError
from transformer.settings import settings

GREEDY_BELOW = 1e-6  # temperatures this small would overflow the logits; they mean greedy


@settings
class Sampling:
    """How the next token is chosen. Temperature 0 is greedy: the most likely token, the first of equals."""

    temperature: float = 0.8
    top_k: int = 0  # 0, or the vocabulary's size and more: off. Tokens as likely as the k-th stay too
    top_p: float = 1.0  # 1: off. arXiv:1904.09751; the token that crosses the threshold stays
    min_p: float = 0.0  # 0: off. arXiv:2407.01082
    repetition_penalty: float = 1.0  # 1: off. arXiv:1909.05858, section 4.1

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW


def check(sampling: Sampling) -> None:
    """UserError for a value outside its range, and for a filter that greedy choice makes pointless."""
    ranges = {
        "temperature": (sampling.temperature, 0.0, math.inf),
        "top_p": (sampling.top_p, 0.0, 1.0),
        "min_p": (sampling.min_p, 0.0, 1.0),
        "top_k": (sampling.top_k, 0, math.inf),
    }
    for name, (value, low, high) in ranges.items():
        if not (low <= value <= high and math.isfinite(value)):
            upper = f" to {high:g}" if math.isfinite(high) else " or more"
            raise UserError(f"--{name}: {value} is not a number of {low:g}{upper}")
    if not (sampling.repetition_penalty > 0 and math.isfinite(sampling.repetition_penalty)):
        raise UserError(f"--repetition_penalty: {sampling.repetition_penalty} is not a number above 0")
    usual = Sampling()
    for name in ("top_k", "top_p", "min_p"):
        if sampling.greedy and getattr(sampling, name) != getattr(usual, name):
            raise UserError(
                f"--{name}: has no effect at temperature 0, which takes the most likely token; leave it out"
            )


def penalise(logits_BV: jax.Array, seen_BV: jax.Array, penalty: float) -> jax.Array:
    """Make tokens that are in the text already less likely, whatever the sign of their logit."""
    lowered_BV = jnp.where(logits_BV > 0, logits_BV / penalty, logits_BV * penalty)
    return jnp.where(seen_BV, lowered_BV, logits_BV)


def keep_top_k(logits_BV: jax.Array, k: int) -> jax.Array:
    """Minus infinity for all but the k most likely; tokens equal to the k-th are kept."""
    if k <= 0 or k >= logits_BV.shape[-1]:
        return logits_BV
    kth_B1 = jax.lax.top_k(logits_BV, k)[0][..., -1:]
    return jnp.where(logits_BV >= kth_B1, logits_BV, -jnp.inf)


def keep_top_p(logits_BV: jax.Array, p: float) -> jax.Array:
    """Minus infinity outside the smallest set of most likely tokens whose probabilities reach p.

    A token stays where those before it in falling order sum to less than p, so the one that crosses
    p stays, and the most likely always does.
    """
    if p >= 1.0:
        return logits_BV
    order_BV = jnp.argsort(-logits_BV, axis=-1)
    sorted_BV = jnp.take_along_axis(jax.nn.softmax(logits_BV, -1), order_BV, -1)
    before_BV = jnp.cumsum(sorted_BV, -1) - sorted_BV
    keep_BV = (before_BV < p) | (jnp.arange(logits_BV.shape[-1])[None] == 0)
    rank_BV = jnp.argsort(order_BV, axis=-1)
    return jnp.where(jnp.take_along_axis(keep_BV, rank_BV, -1), logits_BV, -jnp.inf)


def keep_min_p(logits_BV: jax.Array, p: float) -> jax.Array:
    """Minus infinity for tokens less likely than p times the most likely one."""
    if p <= 0.0:
        return logits_BV
    return jnp.where(logits_BV >= logits_BV.max(-1, keepdims=True) + math.log(p), logits_BV, -jnp.inf)


def admitted(sampling: Sampling, logits_BV: jax.Array, seen_BV: jax.Array) -> jax.Array:
    """What is drawn from, as float32 logits [B, V]: minus infinity for tokens that may not come. Greedy choice leaves
    one."""
    if sampling.repetition_penalty != 1.0:
        logits_BV = penalise(logits_BV, seen_BV, sampling.repetition_penalty)
    if sampling.greedy:
        best_B1 = jnp.argmax(logits_BV, -1, keepdims=True)
        return jnp.where(jnp.arange(logits_BV.shape[-1])[None] == best_B1, 0.0, -jnp.inf)
    logits_BV = logits_BV / sampling.temperature
    logits_BV = keep_top_k(logits_BV, sampling.top_k)
    logits_BV = keep_top_p(logits_BV, sampling.top_p)
    return keep_min_p(logits_BV, sampling.min_p)


def choose(sampling: Sampling, logits_BV: jax.Array, seen_BV: jax.Array, keys_B: jax.Array) -> jax.Array:
    """The next token of each row, int32 [B], from float32 logits and one random key per row."""
    admitted_BV = admitted(sampling, logits_BV, seen_BV)
    if sampling.greedy:
        return jnp.argmax(admitted_BV, -1).astype(jnp.int32)
    return jax.vmap(jax.random.categorical)(keys_B, admitted_BV).astype(jnp.int32)
