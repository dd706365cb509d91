"""The MLP of a block: each position on its own, through a wider layer and back.

A kind's settings say what it costs at a model width of D: ``hidden`` is F, ``matrices`` the weights of its products,
``idle`` those of them that a token does not meet (with ``bias`` of all its weights), ``biases`` its other weights where
the model has biases, and ``kept`` the numbers of a token that the backward pass needs.

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
    """Two matrices with a GELU between them. arXiv:1606.08415; width none means 4 D."""

    width: int | None = None
    exact: bool = False  # by the normal distribution itself; false: the paper's tanh form

    def hidden(self, model_width: int) -> int:
        return self.width or 4 * model_width

    def matrices(self, D: int) -> int:
        return 2 * D * self.hidden(D)

    def idle(self, D: int, bias: bool = False) -> int:
        return 0

    def biases(self, D: int) -> int:
        return self.hidden(D) + D

    def kept(self, D: int) -> int:
        return 2 * self.hidden(D)


@settings
class Gated:
    """Three matrices, one gating another; width none means 8/3 D, rounded up to a multiple of 8."""

    width: int | None = None

    def hidden(self, model_width: int) -> int:
        return self.width or -(-8 * model_width // 24) * 8

    def matrices(self, D: int) -> int:
        return 3 * D * self.hidden(D)

    def idle(self, D: int, bias: bool = False) -> int:
        return 0

    def biases(self, D: int) -> int:
        return 2 * self.hidden(D) + D

    def kept(self, D: int) -> int:
        return 3 * self.hidden(D)


@settings
class Swiglu(Gated):
    """Three matrices, a SiLU of one gating another. arXiv:2002.05202; width none means 8/3 D, rounded up to 8."""


@settings
class Geglu(Gated):
    """As swiglu, the gate a GELU. arXiv:2002.05202."""

    exact: bool = False  # by the normal distribution itself; false: the tanh form


class Mlp(nn.Module):
    config: Model

    @nn.compact
    def __call__(self, x_BTD: jax.Array, counted_BT: jax.Array | None = None) -> jax.Array:
        c = self.config  # which tokens count is nothing to it, as each goes the same way
        hidden = c.mlp.hidden(c.width)

        def widen(name: str, x_BTD: jax.Array) -> jax.Array:
            layer = Einsum((c.width, hidden), ("width", "mlp"), HIDDEN, c.matrix_std, c.bias, name=name)
            return layer("BTD,DF->BTF", x_BTD)

        if isinstance(c.mlp, Swiglu):
            h_BTF = jax.nn.silu(widen("gate", x_BTD)) * widen("up", x_BTD)
        elif isinstance(c.mlp, Geglu):
            h_BTF = jax.nn.gelu(widen("gate", x_BTD), approximate=not c.mlp.exact) * widen("up", x_BTD)
        else:
            assert isinstance(c.mlp, Gelu)
            h_BTF = jax.nn.gelu(widen("up", x_BTD), approximate=not c.mlp.exact)
        down = Einsum((hidden, c.width), ("mlp", "width"), STREAM, c.residual_std, c.bias, role="residual", name="down")
        return down("BTF,FD->BTD", h_BTF)
