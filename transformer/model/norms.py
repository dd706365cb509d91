"""Norms, in float32 and in two passes (mean, then the mean of squared distances from it).

B rows, T positions, D model width.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from flax import linen as nn

from transformer.model.layers import weight
from transformer.parallel.rules import put
from transformer.settings import settings

if TYPE_CHECKING:
    from transformer.model.config import Model


@settings
class LayerNorm:
    """(x - mean) / sqrt(variance + epsilon), scaled and, where the model has biases, shifted. arXiv:1607.06450."""

    epsilon: float = 1e-5


@settings
class RmsNorm:
    """x / sqrt(mean(x^2) + epsilon), scaled. arXiv:1910.07467."""

    epsilon: float = 1e-5
    centered: bool = False  # the weight is the scale's distance from one (Gemma, arXiv:2403.08295)


def scale(module: nn.Module, kind: LayerNorm | RmsNorm, shape: tuple[int, ...], axes: tuple[str, ...]) -> jax.Array:
    """Declare what a norm's result is multiplied by, one at first."""
    if isinstance(kind, RmsNorm) and kind.centered:
        return 1 + weight(module, "scale", shape, axes, role="bias", std=0.0)
    return weight(module, "scale", shape, axes, role="scale", std=0.0)


class Norm(nn.Module):
    """The norm that the model's settings ask for, over the last dimension."""

    config: Model

    @nn.compact
    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        kind = self.config.norm
        x32 = x_BTD.astype(jnp.float32)
        if isinstance(kind, LayerNorm):
            x32 = x32 - x32.mean(-1, keepdims=True)
        y = x32 * jax.lax.rsqrt(jnp.square(x32).mean(-1, keepdims=True) + kind.epsilon)
        scale_D = scale(self, kind, x_BTD.shape[-1:], ("width",))
        y = y * put(scale_D, "stream")[None, None, :]
        if isinstance(kind, LayerNorm) and self.config.bias:
            shift_D = weight(self, "b", x_BTD.shape[-1:], ("width",), role="bias", std=0.0)
            y = y + put(shift_D, "stream")[None, None, :]
        return y.astype(x_BTD.dtype)
