"""Softmax attention with N query heads that share K key/value heads: multi-head, multi-query, grouped.

B rows, T query positions, S key positions, D model width, N query heads, K key/value heads,
G query heads per key/value head, H width of one head.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from transformer.model import cache, kernels, spans
from transformer.model.layers import Einsum, weight
from transformer.model.masks import Mask
from transformer.model.positions import Relative, rotate
from transformer.model.scores import Scoring, Softmax, scoring
from transformer.parallel.rules import spec
from transformer.settings import settings

if TYPE_CHECKING:
    from transformer.model.config import Model


@settings
class MultiHead:
    """Each query head has a key/value head of its own. arXiv:1706.03762, section 3.2.2."""

    def kv_count(self, heads: int) -> int:
        return heads


@settings
class MultiQuery:
    """All query heads share one key/value head. arXiv:1911.02150."""

    def kv_count(self, heads: int) -> int:
        return 1


@settings
class Grouped:
    """Query heads in groups that share a key/value head. arXiv:2305.13245."""

    kv_heads: int = 2

    def kv_count(self, heads: int) -> int:
        return self.kv_heads


class GroupedAttention(nn.Module):
    """Project to queries, keys and values, mix the values by score, project back to the stream."""

    config: Model

    @nn.compact
    def __call__(
        self, x_BTD: jax.Array, mask: Mask, rotation: Any = None, view: cache.View | None = None
    ) -> tuple[jax.Array, Any]:
        c = self.config
        D, N, H = c.width, c.heads, c.head_size
        K = c.attention.projection.kv_count(N)

        def project(name: str, heads: int, axis: str) -> jax.Array:
            out = ("batch", "time", axis, "head_width")
            layer = Einsum((D, heads, H), ("width", axis, "head_width"), out, c.init_std, c.bias, name=name)
            return layer("BTD,DNH->BTNH", x_BTD)

        q_BTNH = project("query", N, "heads")
        k_BTKH, v_BTKH = project("key", K, "kv_heads"), project("value", K, "kv_heads")
        if c.attention.qk_norm != "none":
            q_BTNH = HeadNorm(c, "heads", name="query_norm")(q_BTNH)
            k_BTKH = HeadNorm(c, "kv_heads", name="key_norm")(k_BTKH)
        if rotation is not None:
            q_BTNH, k_BTKH = rotate(q_BTNH, rotation), rotate(k_BTKH, rotation)

        new_cache, k_BSKH, v_BSKH = None, k_BTKH, v_BTKH
        mask = dataclasses.replace(mask, **spans.limits(c.attention.span))
        if view is not None:
            new_cache, k_BSKH, v_BSKH, mask = cache.extend(view, k_BTKH, v_BTKH, mask, spans.reach(c.attention.span))

        B, T = q_BTNH.shape[:2]
        grouped = spec("batch", "time", "kv_heads", None, "head_width")
        q_BTKGH = jax.lax.reshape(q_BTNH, (B, T, K, N // K, H), out_sharding=grouped)
        mixed_BTKGH = self.mix(q_BTKGH, k_BSKH, v_BSKH, mask, self.scoring(K))
        flat = spec("batch", "time", "heads", "head_width")
        mixed_BTNH = jax.lax.reshape(mixed_BTKGH, (B, T, N, H), out_sharding=flat)
        if c.attention.gate:
            mixed_BTNH = mixed_BTNH * jax.nn.sigmoid(project("gate", N, "heads"))

        stream = ("batch", "time", "stream")
        axes = ("heads", "head_width", "width")
        back = Einsum((N, H, D), axes, stream, c.residual_std, c.bias, role="residual", name="out")
        return back("BTNH,NHD->BTD", mixed_BTNH), new_cache

    def mix(self, q_BTKGH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, mask: Mask, how: Scoring) -> jax.Array:
        """What each query takes from the values, [B, T, K, G, H]. (`analysis.watch` sees the scores' makings here.)"""
        return kernels.attend(self.config.attention.kernel, q_BTKGH, k_BSKH, v_BSKH, mask, how)

    def scoring(self, K: int) -> Scoring:
        """What is done with scores, with the weights that it has."""
        c = self.config
        learned = {}
        G = c.heads // K
        if isinstance(c.attention.scores, Softmax) and c.attention.scores.sinks:
            learned["sinks_KG"] = weight(self, "sinks", (K, G), ("kv_heads", "group"), role="bias", std=0.0)
        if isinstance(c.positions, Relative):
            shape, axes = (c.positions.buckets, K, G), ("position", "kv_heads", "group")
            learned["table_XKG"] = weight(self, "distances", shape, axes, role="position", std=c.init_std)
        return scoring(c, K, **learned)


class HeadNorm(nn.Module):
    """Queries or keys scaled to a root mean square of one, over each head or over all of them together, in float32.

    Over the head: arXiv:2302.05442; over the width: OLMo 2, arXiv:2501.00656, section 3.2.
    """

    config: Model
    axis: str

    @nn.compact
    def __call__(self, x_BTNH: jax.Array) -> jax.Array:
        c = self.config
        head = c.attention.qk_norm == "head"
        x32 = x_BTNH.astype(jnp.float32)
        y = x32 * jax.lax.rsqrt(jnp.square(x32).mean(-1 if head else (-2, -1), keepdims=True) + c.norm.epsilon)
        shape, axes = ((c.head_size,), ("head_width",)) if head else (x_BTNH.shape[2:], (self.axis, "head_width"))
        scale = weight(self, "scale", shape, axes, role="scale", std=0.0)
        return (y * scale.reshape((1,) * (4 - scale.ndim) + scale.shape)).astype(x_BTNH.dtype)
