"""Where in the stack a block stands, for what depends on it; and what the first block hands on: its values.

Value residual (ResFormer), arXiv:2410.17897, section 3: the values of a later block are mixed with the first one's,

    v  becomes  l1 v_first + l2 v,   with l1 = l2 = 1/2, fixed or where learning starts.

B rows, T positions, D model width, K key/value heads, H width of one head.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from transformer.model.heads import head_layer, project
from transformer.model.layers import weight
from transformer.model.norms import Norm

if TYPE_CHECKING:
    from transformer.model.config import Model


class Place(NamedTuple):
    """``number`` counts the blocks on the way, from 0 and through every loop."""

    number: jax.Array | int = 0
    first_BTKH: jax.Array | None = None  # the first block's values; None where no block asks for them


FIRST = Place()


def values(module: nn.Module, c: Model, x_BTD: jax.Array, heads: int, place: Place) -> jax.Array:
    """The values of a block that reads ``x``, mixed with the first block's where the settings say so: [B, T, K, H]."""
    own_BTKH = project(c, x_BTD, "value", heads, "kv_heads")
    if c.attention.value_residual == "none":
        return own_BTKH
    shares = jnp.full((2,), 0.5)
    if c.attention.value_residual == "learned":
        shares = 0.5 * weight(module, "value_shares", (2,), ("group",), role="scale", std=0.0)
    first_BTKH = own_BTKH if place.first_BTKH is None else place.first_BTKH
    mixed_BTKH = (shares[0] * first_BTKH + shares[1] * own_BTKH).astype(own_BTKH.dtype)
    return jnp.where(place.number == 0, own_BTKH, mixed_BTKH)


def first_values(c: Model, block: Any, x_BTD: jax.Array) -> Any:
    """The values of the first block, from its weights and what it reads; None where no block asks for them."""
    if c.attention.value_residual == "none":
        return None
    read: Any = x_BTD
    if c.norms not in ("post", "after"):
        read = Norm(c, parent=None).apply({"params": block["attention_norm"]}, x_BTD)
    weights = block["attention"]["value"]
    layer = head_layer(c, None, weights["w"].shape[1], "kv_heads").clone(parent=None)
    with jax.named_scope("attention"):
        first: Any = layer.apply({"params": weights}, "BTD,DNH->BTNH", read)
    return first


def residual_weights(c: Model) -> int:
    """How many weights ``values`` has besides its product's."""
    return 2 if c.attention.value_residual == "learned" else 0
