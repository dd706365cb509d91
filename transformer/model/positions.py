"""Where a token stands in its text: vectors added to the stream, or rotations of queries and keys.

B rows, T positions, D model width, N heads, H width of one head.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax.sharding import PartitionSpec

from transformer.errors import UserError
from transformer.model.layers import weight
from transformer.parallel.rules import spec
from transformer.settings import settings

if TYPE_CHECKING:
    from transformer.model.config import Model


@settings
class Learned:
    """One learned vector for each position of the context, added to the embedding (GPT-2).

    ``x_t + table_t``
    """


@settings
class Sinusoidal:
    """Fixed sines and cosines of falling frequency, added to the embedding. arXiv:1706.03762, section 3.5.

    ``x_t + [sin(t f_i), cos(t f_i)], f_i = base^(-2 i / D)``
    """

    base: float = 10_000.0


@settings
class Unscaled:
    """Angles as they are.

    ``f_i = base^(-2 i / H)``
    """


@settings
class Linear:
    """Positions divided by ``factor``. arXiv:2306.15595.

    ``f_i / factor``
    """

    factor: float = 2.0


@settings
class Ntk:
    """The base grows so that the slowest angle is divided by ``factor`` and the fastest stays (bloc97, 2023).

    ``base factor^(H / (H - 2))``
    """

    factor: float = 2.0


@settings
class Yarn:
    """Slow angles divided by ``factor``, fast ones kept, a ramp between; scores a little sharper. arXiv:2309.00071.

    ``f_i (1 - ramp_i + ramp_i / factor), q and k times 0.1 ln(factor) + 1``
    """

    factor: float = 2.0
    original_context: int = 2048  # that the model was trained with
    fast: float = 32.0  # angles that turn more often than this within it are kept
    slow: float = 1.0  # those that turn less often are divided
    sharpen: bool = True  # the paper's 0.1 log(factor) + 1 on queries and keys


@settings
class Llama3:
    """As Yarn, the ramp over wave lengths and without sharper scores (Llama 3.1's code). arXiv:2407.21783.

    ``f_i (ramp_i + (1 - ramp_i) / factor), ramp_i = (original_context / (2 pi / f_i) - low) / (high - low) in [0, 1]``
    """

    factor: float = 8.0
    original_context: int = 8192
    low: float = 1.0  # wave lengths above original_context / low are divided
    high: float = 4.0  # those below original_context / high are kept


@settings
class Rotary:
    """Queries and keys rotated by an angle that grows with the position; half-split layout. arXiv:2104.09864.

    ``(q_i + j q_(i + H/2)) exp(j t f_i), and so k with s, f_i = base^(-2 i / H)``
    """

    base: float = 10_000.0
    share: float = 1.0  # of a head's width, from its start, that is rotated
    scaling: Unscaled | Linear | Ntk | Yarn | Llama3 = Unscaled()

    def features(self, head_width: int) -> int:
        """How many numbers of a head are rotated."""
        return round(head_width * self.share)


@settings
class Alibi:
    """Scores fall with the distance, in each head at a speed of its own. arXiv:2108.12409; see `scores`.

    ``z_ts - 2^(-8 n / N) (t - s), n = 1..N where N is a power of two``
    """


@settings
class Relative:
    """A learned number for each bucket of distances and each head, added to the scores (T5). arXiv:1910.10683.

    ``z_ts + table[bucket(t - s), n]``
    """

    buckets: int = 32
    farthest: int = 128  # from this distance on all share the last bucket


@settings
class None_:
    """No positions at all: the causal mask alone tells them apart. arXiv:2305.19466.

    ``z_ts``
    """


class Signal(NamedTuple):
    """What a kind of position gives: a vector to add [B, T, D], or cosines and sines [B, T, H/2], or neither."""

    added_BTD: jax.Array | None = None
    rotation: tuple[jax.Array, jax.Array] | None = None


def angles(positions_BT: jax.Array, features: int, base: float) -> jax.Array:
    """position * base^(-2i/features) for i below features/2, float32 [B, T, features/2].

    In float32 whatever the compute dtype: in bfloat16 the positions 256 and 257 would be one.
    """
    return positions_BT.astype(jnp.float32)[..., None] * jnp.asarray(speeds(features, base))[None, None, :]


def speeds(features: int, base: float) -> np.ndarray:
    """The angle from one position to the next, of each pair: base^(-2i/features), float32 [features/2]."""
    return np.asarray(base ** (-np.arange(0, features, 2) / features), np.float32)


def scaled_speeds(rotary: Rotary, features: int) -> np.ndarray:
    """``speeds`` as the rotary's scaling changes them."""
    scaling, base = rotary.scaling, rotary.base
    speed = speeds(features, base)
    if isinstance(scaling, Linear):
        return speed / np.float32(scaling.factor)
    if isinstance(scaling, Ntk):
        return speeds(features, base * scaling.factor ** (features / (features - 2)))
    if isinstance(scaling, Yarn):
        turns = scaling.original_context * speed / (2 * math.pi)
        # The ramp is over the pairs' numbers, from the last that turns ``fast`` times to the first that does ``slow``.
        i = [
            features * math.log(scaling.original_context / (2 * math.pi * x)) / (2 * math.log(base))
            for x in (scaling.fast, scaling.slow)
        ]
        first, last = max(math.floor(i[0]), 0), min(math.ceil(i[1]), features - 1)
        kept = 1 - np.clip((np.arange(len(turns)) - first) / max(last - first, 1e-3), 0, 1)
        return np.asarray(speed * kept + speed / scaling.factor * (1 - kept), np.float32)
    if isinstance(scaling, Llama3):
        ratio = scaling.original_context * speed / (2 * math.pi)  # wave lengths in the original context
        kept = np.clip((ratio - scaling.low) / (scaling.high - scaling.low), 0, 1)
        return np.asarray(speed * kept + speed / scaling.factor * (1 - kept), np.float32)
    return speed


def rotate(x_BTNH: jax.Array, rotation: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotate the pairs (i, i + R/2) of the first R numbers of each head by its position's angle, in float32."""
    cos_BT1h, sin_BT1h = (part[:, :, None, :] for part in rotation)
    half = cos_BT1h.shape[-1]
    first, second, rest = jnp.split(x_BTNH.astype(jnp.float32), (half, 2 * half), axis=-1)
    turned = (first * cos_BT1h - second * sin_BT1h, second * cos_BT1h + first * sin_BT1h, rest)
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
        rotary = self.config.positions
        assert isinstance(rotary, Rotary)
        speed = jnp.asarray(scaled_speeds(rotary, rotary.features(self.config.rotated_width)))
        angle = positions_BT.astype(jnp.float32)[..., None] * speed[None, None, :]
        size = 1.0
        if isinstance(rotary.scaling, Yarn) and rotary.scaling.sharpen:
            size = 0.1 * math.log(rotary.scaling.factor) + 1
        return Signal(rotation=(size * jnp.cos(angle), size * jnp.sin(angle)))


class ScoresPositions(nn.Module):
    """Positions that only the scores know of, or nobody."""

    config: Model

    def __call__(self, positions_BT: jax.Array) -> Signal:
        return Signal()


# A kind of position is one row: its settings and the module that turns positions into a signal.
POSITIONS: dict[type, type[nn.Module]] = {
    Learned: LearnedPositions,
    Sinusoidal: SinusoidalPositions,
    Rotary: RotaryPositions,
    Alibi: ScoresPositions,
    Relative: ScoresPositions,
    None_: ScoresPositions,
}


def check(model: Model) -> None:
    """UserError for positions that cannot be built."""
    positions, where = model.positions, "config.model.positions"
    if isinstance(positions, Rotary):
        features = positions.features(model.rotated_width)
        if not 0 < positions.share <= 1 or features % 2 or not features:
            raise UserError(
                f"{where}.share: rotary needs an even part of the {model.rotated_width} numbers of a head that turn, "
                f"found {features} of them; set positions.share, or an even width"
            )
        for name in ("factor", "original_context", "fast", "slow", "low", "high"):
            if getattr(positions.scaling, name, 1) <= 0:
                raise UserError(f"{where}.scaling.{name}: {getattr(positions.scaling, name)} is not above 0")
        factor = getattr(positions.scaling, "factor", 1)
        if factor < 1:
            raise UserError(f"{where}.scaling.factor: {factor} would shorten the context; set 1 or more")
        if isinstance(positions.scaling, Ntk) and features == 2:
            raise UserError(f"{where}.scaling: ntk needs more than one pair of numbers in a head")
    if isinstance(positions, Sinusoidal) and model.width % 2:
        raise UserError(f"{where}: sinusoidal needs an even width, found {model.width}")
    if isinstance(positions, Rotary | Sinusoidal) and positions.base <= 1:
        raise UserError(f"{where}.base: {positions.base} is not above 1")
    if isinstance(positions, Relative) and not 2 <= positions.buckets // 2 < positions.farthest:
        raise UserError(
            f"{where}.buckets: {positions.buckets} buckets do not divide the distances to {positions.farthest}; "
            f"set 4 or more, and less than twice that distance"
        )


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
