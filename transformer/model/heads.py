"""What kinds of attention have in common: from the stream to heads, norms and rotations of heads, and back.

B rows, T positions, D model width, N query heads, K key/value heads, G query heads per key/value head, H width of one
head.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import jax
import jax.numpy as jnp
from flax import linen as nn

from transformer.model import kernels, parametrisation
from transformer.model.layers import Einsum, weight
from transformer.model.masks import Mask
from transformer.model.norms import scale
from transformer.model.positions import Relative, rotate
from transformer.model.scores import Scoring, Softmax, scoring

if TYPE_CHECKING:
    from transformer.model.config import Model


def head_layer(c: Model, name: str | None, heads: int, axis: str) -> Einsum:
    """From the stream to ``heads`` heads."""
    inner, _ = c.attention.biased(c.bias)
    out = ("batch", "time", axis, "head_width")
    return Einsum((c.width, heads, c.head_size), ("width", axis, "head_width"), out, c.matrix_std, inner, name=name)


def project(c: Model, x_BTD: jax.Array, name: str, heads: int, axis: str = "heads") -> jax.Array:
    """The stream as ``heads`` heads, [B, T, N, H]."""
    return head_layer(c, name, heads, axis)("BTD,DNH->BTNH", x_BTD)


def back(c: Model, mixed_BTNH: jax.Array, x_BTD: jax.Array) -> jax.Array:
    """What heads mixed, gated by the block's input ``x`` where the settings ask for it, as the stream: [B, T, D]."""
    N, H = mixed_BTNH.shape[2:]
    if c.attention.gate:
        mixed_BTNH = mixed_BTNH * jax.nn.sigmoid(project(c, x_BTD, "gate", N))
    stream, (_, outer) = ("batch", "time", "stream"), c.attention.biased(c.bias)
    axes = ("heads", "head_width", "width")
    layer = Einsum((N, H, c.width), axes, stream, c.residual_std, outer, role="residual", name="out")
    return layer("BTNH,NHD->BTD", mixed_BTNH)


def placed(c: Model, q_BTNH: jax.Array, k_BTKH: jax.Array, rotation: Any) -> tuple[jax.Array, jax.Array]:
    """Queries and keys normed as the settings say, and rotated where there is a ``rotation``."""
    if c.attention.qk_norm != "none":
        q_BTNH = HeadNorm(c, "heads", c.attention.qk_norm, name="query_norm")(q_BTNH)
        k_BTKH = HeadNorm(c, "kv_heads", c.attention.qk_norm, name="key_norm")(k_BTKH)
    if rotation is not None:
        q_BTNH, k_BTKH = rotate(q_BTNH, rotation), rotate(k_BTKH, rotation)
    if c.attention.score_width is not None:  # the kernels divide by the root of H
        q_BTNH = q_BTNH * (q_BTNH.shape[-1] / c.attention.score_width) ** 0.5
    q_BTNH = parametrisation.times(q_BTNH, parametrisation.queries(c))
    return q_BTNH, k_BTKH


class Mixing(nn.Module):
    """Attention with one score table for each head."""

    config: Model

    def mix(self, q_BTKGH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, mask: Mask, how: Scoring) -> jax.Array:
        """What each query takes from the values, [B, T, K, G, H]. (`analysis.watch` sees the scores' makings here.)"""
        return kernels.attend(self.config.attention.kernel, q_BTKGH, k_BSKH, v_BSKH, mask, how)


def learned_scoring(module: nn.Module, c: Model, K: int) -> Scoring:
    """What is done with scores, with the weights that ``module`` has for it."""
    learned = {}
    G = c.heads // K
    if isinstance(c.attention.scores, Softmax) and c.attention.scores.sinks:
        learned["sinks_KG"] = weight(module, "sinks", (K, G), ("kv_heads", "group"), role="bias", std=0.0)
    if isinstance(c.positions, Relative):
        shape, axes = (c.positions.buckets, K, G), ("position", "kv_heads", "group")
        learned["table_XKG"] = weight(module, "distances", shape, axes, role="position", std=c.init_std)
    return scoring(c, K, **learned)


def scoring_weights(c: Model) -> int:
    """How many weights ``learned_scoring`` has."""
    sinks = c.heads if isinstance(c.attention.scores, Softmax) and c.attention.scores.sinks else 0
    return sinks + (c.positions.buckets * c.heads if isinstance(c.positions, Relative) else 0)


class HeadNorm(nn.Module):
    """Heads scaled to a root mean square of one, over each head or over all of them together, in float32.

    Of queries and keys, over the head: arXiv:2302.05442; over the width: OLMo 2, arXiv:2501.00656, section 3.2.
    """

    config: Model
    axis: str
    over: Literal["head", "width"]

    @nn.compact
    def __call__(self, x_BTNH: jax.Array) -> jax.Array:
        head = self.over == "head"
        x32 = x_BTNH.astype(jnp.float32)
        mean = jnp.square(x32).mean(-1 if head else (-2, -1), keepdims=True)
        y = x32 * jax.lax.rsqrt(mean + self.config.norm.epsilon)
        shape, axes = (x_BTNH.shape[2:], (self.axis, "head_width")) if not head else (x_BTNH.shape[3:], ("head_width",))
        by = scale(self, self.config.norm, shape, axes)
        return (y * by.reshape((1,) * (4 - by.ndim) + by.shape)).astype(x_BTNH.dtype)
