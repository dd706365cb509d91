"""One pre-norm block: two residual lines. arXiv:2002.04745.

B rows, T positions, D model width.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import jax
from flax import linen as nn

from transformer.model import attention, parametrisation
from transformer.model.cache import View
from transformer.model.masks import Mask
from transformer.model.mlp import Geglu, Gelu, Mlp, Swiglu
from transformer.model.moe import Mixture, Moe
from transformer.model.norms import Norm
from transformer.model.place import FIRST, Place
from transformer.parallel.context import arrange
from transformer.parallel.rules import drawn, put

if TYPE_CHECKING:
    from transformer.model.config import Model

MLPS: dict[type, type[nn.Module]] = {Gelu: Mlp, Swiglu: Mlp, Geglu: Mlp, Moe: Mixture}


class Block(nn.Module):
    """``x + attention(norm(x))``, then ``x + mlp(norm(x))``. The second result is the updated cache, if any.

    That is pre-norm. ``config.norms`` moves the norms (post: arXiv:1706.03762, 5.4; sandwich: arXiv:2105.13290; peri:
    arXiv:2502.02732; after each branch alone: OLMo 2, arXiv:2501.00656, 3.2), ``config.parallel`` lets both branches
    read the same stream (arXiv:2204.02311, section 2).
    """

    config: Model
    train: bool = False

    @nn.compact
    def __call__(
        self,
        x_BTD: jax.Array,
        mask: Mask,
        rotation: Any = None,
        view: View | None = None,
        place: Place = FIRST,
        counted_BT: jax.Array | None = None,
    ) -> tuple[jax.Array, Any]:
        c = self.config
        attend, mlp = attention.kind(c).module(c, name="attention"), MLPS[type(c.mlp)](c, name="mlp")

        with jax.named_scope("attention"):
            added_BTD, new_cache = attend(self.before("attention", x_BTD), mask, rotation, view, place)
            y_BTD = self.after("attention", x_BTD, added_BTD)
        with jax.named_scope("mlp"):
            added_BTD = mlp(self.before("mlp", x_BTD if c.parallel else y_BTD), counted_BT)
            y_BTD = self.after("mlp", y_BTD, added_BTD)
        return y_BTD, new_cache

    def before(self, branch: str, x_BTD: jax.Array) -> jax.Array:
        """What a branch reads of the stream."""
        return x_BTD if self.config.norms in ("post", "after") else Norm(self.config, name=f"{branch}_norm")(x_BTD)

    def after(self, branch: str, x_BTD: jax.Array, added_BTD: jax.Array) -> jax.Array:
        """The stream with what a branch gives."""
        c = self.config
        if c.norms in ("sandwich", "peri", "after"):
            added_BTD = Norm(c, name=f"{branch}_norm_after")(added_BTD)
        added_BTD = parametrisation.times(added_BTD, parametrisation.branch(c))
        x_BTD = x_BTD + dropout(self, added_BTD, c.dropout, self.train)
        return Norm(c, name=f"{branch}_norm")(x_BTD) if c.norms == "post" else x_BTD


def dropout(module: nn.Module, x_BTD: jax.Array, rate: float, train: bool) -> jax.Array:
    """Zero a share ``rate`` of ``x`` and scale up the rest, in training only. arXiv:1207.0580."""
    if not train or rate == 0.0:
        return x_BTD
    draw = functools.partial(jax.random.bernoulli, module.make_rng("dropout"), 1 - rate)
    keep_BTD = drawn(draw, x_BTD.shape, "batch", None, "stream")
    keep_BTD = put(arrange(keep_BTD), "batch", "time", "stream")
    return jax.numpy.where(keep_BTD, x_BTD / (1 - rate), 0).astype(x_BTD.dtype)
