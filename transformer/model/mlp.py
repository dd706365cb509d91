"""The MLP of a block: each position on its own, through a wider layer and back.

B rows, T positions, D model width, F hidden width of the MLP.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
from flax import linen as nn

from transformer.model.layers import Einsum
from transformer.settings import settings

if TYPE_CHECKING:
    from transformer.model.config import Model

HIDDEN = ("batch", "time", "mlp")
STREAM = ("batch", "time", "stream")


@settings
class Gelu:
    """Two matrices with a GELU (tanh form) between them. arXiv:1606.08415; width none means 4 D."""

    width: int | None = None

    def hidden(self, model_width: int) -> int:
        return self.width or 4 * model_width


@settings
class Swiglu:
    """Three matrices, one gating another. arXiv:2002.05202; width none means 8/3 D, rounded up to a multiple of 8."""

    width: int | None = None

    def hidden(self, model_width: int) -> int:
        return self.width or -(-8 * model_width // 24) * 8


class Mlp(nn.Module):
    config: Model

    @nn.compact
    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        c = self.config
        hidden = c.mlp.hidden(c.width)

        def widen(name: str, x_BTD: jax.Array) -> jax.Array:
            layer = Einsum((c.width, hidden), ("width", "mlp"), HIDDEN, c.matrix_std, c.bias, name=name)
            return layer("BTD,DF->BTF", x_BTD)

        if isinstance(c.mlp, Swiglu):
            h_BTF = jax.nn.silu(widen("gate", x_BTD)) * widen("up", x_BTD)
        else:
            h_BTF = jax.nn.gelu(widen("up", x_BTD), approximate=True)
        down = Einsum((hidden, c.width), ("mlp", "width"), STREAM, c.residual_std, c.bias, role="residual", name="down")
        return down("BTF,FD->BTD", h_BTF)
