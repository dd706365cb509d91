"""Softmax attention with N query heads that share K key/value heads: multi-head, multi-query, grouped.

B rows, T query positions, S key positions, D model width, N query heads, K key/value heads,
G query heads per key/value head, H width of one head.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import jax
from flax import linen as nn

from transformer.errors import UserError
from transformer.model import cache, spans
from transformer.model.heads import Mixing, back, learned_scoring, placed, project, scoring_weights
from transformer.model.masks import Mask
from transformer.model.place import FIRST, Place, residual_weights, values
from transformer.parallel.rules import spec
from transformer.settings import settings

if TYPE_CHECKING:
    from transformer.model.config import Model


@settings
class MultiHead:
    """Each query head has a key/value head of its own. arXiv:1706.03762, section 3.2.2.

    ``head_n = softmax(q_tn k_sn / sqrt(H)) v_sn``
    """

    def kv_count(self, heads: int) -> int:
        return heads


@settings
class MultiQuery:
    """All query heads share one key/value head. arXiv:1911.02150.

    ``head_n = softmax(q_tn k_s / sqrt(H)) v_s``
    """

    def kv_count(self, heads: int) -> int:
        return 1


@settings
class Grouped:
    """Query heads in groups that share a key/value head. arXiv:2305.13245.

    ``head_n = softmax(q_tn k_sm / sqrt(H)) v_sm, m = floor(n kv_heads / N)``
    """

    kv_heads: int = 2

    def kv_count(self, heads: int) -> int:
        return self.kv_heads


def kv_heads(c: Model) -> int:
    """K, for the kinds here."""
    projection = c.attention.projection
    assert isinstance(projection, MultiHead | MultiQuery | Grouped)
    return projection.kv_count(c.heads)


class GroupedAttention(Mixing):
    """Project to queries, keys and values, mix the values by score, project back to the stream."""

    @nn.compact
    def __call__(
        self,
        x_BTD: jax.Array,
        mask: Mask,
        rotation: Any = None,
        view: cache.View | None = None,
        place: Place = FIRST,
    ) -> tuple[jax.Array, Any]:
        c = self.config
        N, H, K = c.heads, c.head_size, kv_heads(c)
        q_BTNH = project(c, x_BTD, "query", N)
        k_BTKH, v_BTKH = project(c, x_BTD, "key", K, "kv_heads"), values(self, c, x_BTD, K, place)
        q_BTNH, k_BTKH = placed(c, q_BTNH, k_BTKH, rotation)

        new_cache, k_BSKH, v_BSKH = None, k_BTKH, v_BTKH
        mask = dataclasses.replace(mask, **spans.limits(c.attention.span))
        if view is not None:
            new_cache, k_BSKH, v_BSKH, mask = cache.extend(view, k_BTKH, v_BTKH, mask, spans.reach(c.attention.span))

        B, T = q_BTNH.shape[:2]
        grouped = spec("batch", "time", "kv_heads", None, "head_width")
        q_BTKGH = jax.lax.reshape(q_BTNH, (B, T, K, N // K, H), out_sharding=grouped)
        mixed_BTKGH = self.mix(q_BTKGH, k_BSKH, v_BSKH, mask, learned_scoring(self, c, K))
        flat = spec("batch", "time", "heads", "head_width")
        mixed_BTNH = jax.lax.reshape(mixed_BTKGH, (B, T, N, H), out_sharding=flat)
        return back(c, mixed_BTNH, x_BTD), new_cache


def check(c: Model) -> None:
    """UserError for heads that do not divide."""
    N, K = c.heads, kv_heads(c)
    if K < 1 or N % K:
        possible = ", ".join(str(d) for d in range(1, N + 1) if N % d == 0)
        raise UserError(
            f"config.model.attention.projection.kv_heads: {N} query heads do not divide over {K} key/value heads "
            f"(possible: {possible})"
        )


def allocate(c: Model, rows: int, places: int) -> cache.KeyValues:
    places = min(places, spans.reach(c.attention.span) or places)
    return cache.allocate(rows, places, kv_heads(c), c.head_size, c.dtype)


def heads(c: Model) -> int:
    """How many heads the stream is projected to: of queries, keys and values, and the gate."""
    return c.heads + 2 * kv_heads(c) + (c.heads if c.attention.gate else 0)


def matrices(c: Model) -> int:
    return (heads(c) + c.heads) * c.head_size * c.width


def biases(c: Model) -> int:
    inner, outer = c.attention.biased(c.bias)
    return inner * heads(c) * c.head_size + outer * c.width


def rest(c: Model) -> int:
    H = c.head_size
    normed = {"none": 0, "head": 2 * H, "width": (c.heads + kv_heads(c)) * H}[c.attention.qk_norm]
    return normed + scoring_weights(c) + residual_weights(c) + biases(c)
