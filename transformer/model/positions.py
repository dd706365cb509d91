"""Where a token stands in its text: vectors added to the stream, or rotations of queries and keys.

B rows, T positions, D model width, N heads, H width of one head.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.sharding import PartitionSpec

from transformer.model.layers import weight
from transformer.parallel.rules import spec
from transformer.settings import settings

if TYPE_CHECKING:
    from transformer.model.config import Model


@settings
class Learned:
    """One learned vector for each position of the context, added to the embedding (GPT-2)."""


@settings
class Sinusoidal:
    """Fixed sines and cosines of falling frequency, added to the embedding. arXiv:1706.03762, section 3.5."""

    base: float = 10_000.0


@settings
class Rotary:
    """Queries and keys rotated by an angle that grows with the position. arXiv:2104.09864; half-split layout."""

    base: float = 10_000.0


class Signal(NamedTuple):
    """What a kind of position gives: a vector to add [B, T, D], or cosines and sines [B, T, H/2], or neither."""

    added_BTD: jax.Array | None = None
    rotation: tuple[jax.Array, jax.Array] | None = None


def angles(positions_BT: jax.Array, features: int, base: float) -> jax.Array:
    """position * base^(-2i/features) for i below features/2, float32 [B, T, features/2].

    In float32 whatever the compute dtype: in bfloat16 the positions 256 and 257 would be one.
    """
    frequency = base ** (-jnp.arange(0, features, 2, dtype=jnp.float32) / features)
    return positions_BT.astype(jnp.float32)[..., None] * frequency[None, None, :]


def rotate(x_BTNH: jax.Array, rotation: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotate the pairs (i, i + H/2) of each head by its position's angle, in float32."""
    cos_BT1h, sin_BT1h = (part[:, :, None, :] for part in rotation)
    first, second = jnp.split(x_BTNH.astype(jnp.float32), 2, axis=-1)
    turned = (first * cos_BT1h - second * sin_BT1h, second * cos_BT1h + first * sin_BT1h)
    return jnp.concatenate(turned, axis=-1).astype(x_BTNH.dtype)


class LearnedPositions(nn.Module):
    config: Model

    @nn.compact
    def __call__(self, positions_BT: jax.Array) -> Signal:
        c = self.config
        shape, axes = (c.context, c.width), ("position", "width")
        table_TD = weight(self, "table", shape, axes, role="position", std=c.init_std)
        return Signal(added_BTD=lookup(table_TD, positions_BT))


class SinusoidalPositions(nn.Module):
    config: Model

    def __call__(self, positions_BT: jax.Array) -> Signal:
        assert isinstance(self.config.positions, Sinusoidal)
        angle = angles(positions_BT, self.config.width, self.config.positions.base)
        # Scaled down to the size of the embeddings they are added to (init_std), which they would drown.
        waves = jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], axis=-1) * self.config.init_std
        return Signal(added_BTD=waves)


class RotaryPositions(nn.Module):
    config: Model

    def __call__(self, positions_BT: jax.Array) -> Signal:
        assert isinstance(self.config.positions, Rotary)
        angle = angles(positions_BT, self.config.head_size, self.config.positions.base)
        return Signal(rotation=(jnp.cos(angle), jnp.sin(angle)))


# A kind of position is one row: its settings and the module that turns positions into a signal.
POSITIONS: dict[type, type[nn.Module]] = {
    Learned: LearnedPositions,
    Sinusoidal: SinusoidalPositions,
    Rotary: RotaryPositions,
}


def lookup(table_XD: jax.Array, ids_BT: jax.Array) -> jax.Array:
    """Rows of a table [X, D] by id, [B, T, D].

    A table that is cut is looked up where it lies and never gathered: every device finds its part of the width for
    the rows of all devices that hold other parts, and the parts are then exchanged for rows. The same on the way
    back, so the gradient of the whole table is nowhere either. An id outside the table gives not-a-numbers (JAX's
    own default is the last row, in silence).
    """
    rows = spec("batch", "time", "stream")
    found = rows
    if rows is not None:
        width = (*jax.typeof(table_XD).sharding.spec, None, None)[1]
        apart = width if isinstance(width, tuple) else (width,)
        batch, time = (
            tuple(a for a in (axes if isinstance(axes, tuple) else (axes,)) if a is not None and a not in apart) or None
            for axes in rows[:2]
        )
        found = PartitionSpec(batch, time, width)
        ids_BT = jax.reshard(ids_BT, PartitionSpec(batch, time))
    x_BTD = table_XD.at[ids_BT].get(mode="fill", fill_value=jnp.nan, wrap_negative_indices=False, out_sharding=found)
    return x_BTD if rows is None else jax.reshard(x_BTD, rows)
