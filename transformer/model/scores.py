"""From scores to weights: softmax or sigmoid, and what is done to the scores before.

B rows, T query positions, S key positions, K key/value heads, G query heads per key/value head,
X buckets of distances.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from transformer.errors import UserError
from transformer.model.positions import Alibi, Relative
from transformer.parallel.rules import put
from transformer.settings import settings

if TYPE_CHECKING:
    from transformer.model.config import Model


@settings
class Softmax:
    """Weights that sum to one. arXiv:1706.03762, equation 1.

    ``w_ts = exp(z_ts) / sum over s of exp(z_ts)``
    """

    soft_cap: float | None = None  # scores s become c tanh(s / c): arXiv:2408.00118, section 2
    sinks: bool = False  # each head has a learned score that takes its share of the weights and gives nothing


@settings
class Sigmoid:
    """Each weight on its own. arXiv:2409.04431.

    ``w_ts = sigmoid(z_ts + bias)``
    """

    soft_cap: float | None = None
    bias: float | None = None  # none: -log(context), as in the paper


# What a kernel may know to do with scores besides a softmax.
OPTIONS = ("sinks", "ALiBi", "relative biases", "a soft cap", "sigmoids")


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["sinks_KG", "slopes_KG", "table_XKG"],
    meta_fields=["soft_cap", "sigmoid_bias", "farthest"],
)
@dataclasses.dataclass(frozen=True)
class Scoring:
    """What a kernel does with scores besides a softmax; the defaults do nothing.

    ``slopes``: ALiBi, each score less its head's slope times the distance (arXiv:2108.12409). ``table``: a learned
    number for each bucket of distances and head (T5, arXiv:1910.10683, section 2.1), ``farthest`` the distance from
    which on all share the last bucket. ``sigmoid_bias`` asks for sigmoids.
    """

    sinks_KG: jax.Array | None = None
    slopes_KG: jax.Array | None = None
    table_XKG: jax.Array | None = None
    soft_cap: float | None = None
    sigmoid_bias: float | None = None
    farthest: int = 0

    @property
    def options(self) -> tuple[str, ...]:
        """By name, what a kernel must know to do this."""
        given = (self.sinks_KG, self.slopes_KG, self.table_XKG, self.soft_cap, self.sigmoid_bias)
        return tuple(name for name, value in zip(OPTIONS, given, strict=True) if value is not None)


NOTHING = Scoring()


def capped(scores: jax.Array, cap: float) -> tuple[jax.Array, jax.Array]:
    """``c tanh(s / c)``, and its slope."""
    share = jnp.tanh(scores / cap)
    return cap * share, 1 - jnp.square(share)


def alibi(distance_BTS: jax.Array, slopes_KG: jax.Array) -> jax.Array:
    """What ALiBi adds to the scores, float32 [B or 1, K, G, T, S]."""
    return -slopes_KG[None, :, :, None, None] * distance_BTS.astype(jnp.float32)[:, None, None]


def alibi_slopes(heads: int) -> np.ndarray:
    """2^(-8 i / n) for i = 1..n where n is a power of two; else those of the power of two below, then every second one
    of the power above, from its first (as the paper's own code has it)."""
    n = 1 << (heads.bit_length() - 1)
    slopes = [2.0 ** (-8 * i / n) for i in range(1, n + 1)]
    slopes += [2.0 ** (-4 * i / n) for i in range(1, 2 * n + 1, 2)][: heads - n]
    return np.asarray(slopes, np.float32)


def bucket(distance: jax.Array, buckets: int, farthest: int) -> jax.Array:
    """T5's bucket of a distance to an earlier key: half of them for one distance each, then in growing steps."""
    exact = buckets // 2
    ratio = jnp.log(jnp.maximum(distance, 1).astype(jnp.float32) / exact) / math.log(farthest / exact)
    far = exact + (ratio * (buckets - exact)).astype(jnp.int32)
    return jnp.where(distance < exact, jnp.maximum(distance, 0), jnp.minimum(far, buckets - 1))


def adjusted(scores_BKGTS: jax.Array, how: Scoring, distance_BTS: jax.Array) -> jax.Array:
    """Scores as the weights are made of them, but for the mask: the plain kernel's."""
    if how.soft_cap is not None:
        scores_BKGTS = capped(scores_BKGTS, how.soft_cap)[0]
    if how.slopes_KG is not None:
        scores_BKGTS = scores_BKGTS + alibi(distance_BTS, how.slopes_KG)
    if how.table_XKG is not None:
        buckets = how.table_XKG.shape[0]
        hit_BTSX = bucket(distance_BTS, buckets, how.farthest)[..., None] == jnp.arange(buckets)[None, None, None]
        bias_BKGTS = jnp.einsum("BTSX,XKG->BKGTS", hit_BTSX.astype(jnp.float32), how.table_XKG)
        scores_BKGTS = scores_BKGTS + bias_BKGTS
    return scores_BKGTS


def weights(scores_BKGTS: jax.Array, how: Scoring) -> jax.Array:
    """Weights of masked scores, float32: the plain kernel's."""
    if how.sigmoid_bias is not None:
        return jax.nn.sigmoid(scores_BKGTS + how.sigmoid_bias)
    if how.sinks_KG is None:
        return jax.nn.softmax(scores_BKGTS, axis=-1)
    sinks_BKGT = jnp.broadcast_to(how.sinks_KG[None, :, :, None], scores_BKGTS.shape[:-1])
    total_BKGT = jnp.logaddexp(jax.nn.logsumexp(scores_BKGTS, axis=-1), sinks_BKGT)
    return jnp.exp(scores_BKGTS - total_BKGT[..., None])


def check(model: Model) -> None:
    """UserError for settings of scores that mean nothing."""
    cap = model.attention.scores.soft_cap
    if cap is not None and cap <= 0:
        raise UserError(f"config.model.attention.scores.soft_cap: {cap} is not above 0; none for no cap")


def scoring(model: Model, kv_heads: int, **learned: Any) -> Scoring:
    """What this model does with scores; ``learned`` are its weights for that."""
    scores, positions = model.attention.scores, model.positions
    bias = None
    if isinstance(scores, Sigmoid):
        bias = -math.log(model.context) if scores.bias is None else scores.bias
    slopes_KG = None
    if isinstance(positions, Alibi):
        slopes_KG = put(jnp.asarray(alibi_slopes(model.heads).reshape(kv_heads, -1)), "kv_heads", None)
    farthest = positions.farthest if isinstance(positions, Relative) else 0
    return Scoring(slopes_KG=slopes_KG, soft_cap=scores.soft_cap, sigmoid_bias=bias, farthest=farthest, **learned)


def options(model: Model) -> tuple[str, ...]:
    """The options that the model's Scoring will have, from its settings alone."""
    scores, positions = model.attention.scores, model.positions
    asked = (
        isinstance(scores, Softmax) and scores.sinks,
        isinstance(positions, Alibi),
        isinstance(positions, Relative),
        scores.soft_cap is not None,
        isinstance(scores, Sigmoid),
    )
    return tuple(name for name, used in zip(OPTIONS, asked, strict=True) if used)
