"""One pre-norm block: two residual lines. arXiv:2002.04745.

B rows, T positions, D model width.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
from flax import linen as nn

from transformer.model import attention
from transformer.model.cache import View
from transformer.model.masks import Mask
from transformer.model.mlp import Mlp
from transformer.model.norms import Norm
from transformer.parallel.context import arrange
from transformer.parallel.rules import put

if TYPE_CHECKING:
    from transformer.model.config import Model


class Block(nn.Module):
    """``x + attention(norm(x))``, then ``x + mlp(norm(x))``. The second result is the updated cache, if any."""

    config: Model
    train: bool = False

    @nn.compact
    def __call__(
        self, x_BTD: jax.Array, mask: Mask, rotation: Any = None, view: View | None = None
    ) -> tuple[jax.Array, Any]:
        c = self.config
        attend = attention.kind(c).module(c, name="attention")

        with jax.named_scope("attention"):
            added_BTD, new_cache = attend(Norm(c, name="attention_norm")(x_BTD), mask, rotation, view)
            x_BTD = x_BTD + dropout(self, added_BTD, c.dropout, self.train)
        with jax.named_scope("mlp"):
            added_BTD = Mlp(c, name="mlp")(Norm(c, name="mlp_norm")(x_BTD))
            x_BTD = x_BTD + dropout(self, added_BTD, c.dropout, self.train)
        return x_BTD, new_cache


def dropout(module: nn.Module, x_BTD: jax.Array, rate: float, train: bool) -> jax.Array:
    """Zero a share ``rate`` of ``x`` and scale up the rest, in training only. arXiv:1207.0580."""
    if not train or rate == 0.0:
        return x_BTD
    keep_BTD = jax.random.bernoulli(module.make_rng("dropout"), 1 - rate, x_BTD.shape)
    keep_BTD = put(arrange(keep_BTD), "batch", "time", "stream")
    return jax.numpy.where(keep_BTD, x_BTD / (1 - rate), 0).astype(x_BTD.dtype)
