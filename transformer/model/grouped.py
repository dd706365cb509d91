"""Softmax attention with N query heads that share K key/value heads: multi-head, multi-query, grouped.

B rows, T query positions, S key positions, D model width, N query heads, K key/value heads,
G query heads per key/value head, H width of one head.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
from flax import linen as nn

from transformer.model import cache, kernels
from transformer.model.layers import Einsum
from transformer.model.masks import Mask
from transformer.model.positions import rotate
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
        if rotation is not None:
            q_BTNH, k_BTKH = rotate(q_BTNH, rotation), rotate(k_BTKH, rotation)

        new_cache = None
        k_BSKH, v_BSKH = k_BTKH, v_BTKH
        if view is not None:
            new_cache = cache.write(view, k_BTKH, v_BTKH)
            k_BSKH, v_BSKH = cache.read(new_cache)

        B, T = q_BTNH.shape[:2]
        grouped = spec("batch", "time", "kv_heads", None, "head_width")
        q_BTKGH = jax.lax.reshape(q_BTNH, (B, T, K, N // K, H), out_sharding=grouped)
        mixed_BTKGH = kernels.attend(c.attention.kernel, q_BTKGH, k_BSKH, v_BSKH, mask)
        flat = spec("batch", "time", "heads", "head_width")
        mixed_BTNH = jax.lax.reshape(mixed_BTKGH, (B, T, N, H), out_sharding=flat)

        stream = ("batch", "time", "stream")
        axes = ("heads", "head_width", "width")
        back = Einsum((N, H, D), axes, stream, c.residual_std, c.bias, role="residual", name="out")
        return back("BTNH,NHD->BTD", mixed_BTNH), new_cache
