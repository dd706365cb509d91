"""The learning rate of each update, indexed by updates (never by micro-batches)."""

import jax
import jax.numpy as jnp

from transformer.settings import settings


@settings
class Constant:
    """The peak, for ever."""


@settings
class Cosine:
    """Half a cosine from the peak down to ``final`` times it. arXiv:1608.03983 without restarts."""

    final: float = 0.1


@settings
class Linear:
    """A straight line from the peak down to ``final`` times it."""

    final: float = 0.0


@settings
class WarmupStableDecay:
    """The peak, then over the last ``decay`` share of all steps a line down to ``final`` times it. arXiv:2404.06395."""

    decay: float = 0.2
    final: float = 0.0


Schedule = Constant | Cosine | Linear | WarmupStableDecay


def learning_rate(
    schedule: Schedule, peak: float | jax.Array, warmup: int, steps: int, update: jax.Array | int
) -> jax.Array:
    """The rate of update 0, 1, ..., steps - 1, float32.

    The first ``warmup`` updates rise in equal steps, peak/warmup first and the peak last (warmup 4:
    0.25, 0.5, 0.75, 1.0 of it). Then the share of the way is (update - warmup) / (steps - warmup), so
    the last update is one step short of the final rate and no update is lost to a rate of zero.
    """
    update = jnp.asarray(update, jnp.float32)
    rising = (update + 1) / max(warmup, 1)
    gone = jnp.clip((update - warmup) / max(steps - warmup, 1), 0.0, 1.0)
    if isinstance(schedule, Constant):
        factor = jnp.ones_like(gone)
    elif isinstance(schedule, Cosine):
        factor = schedule.final + (1 - schedule.final) * 0.5 * (1 + jnp.cos(jnp.pi * gone))
    elif isinstance(schedule, Linear):
        factor = 1 - (1 - schedule.final) * gone
    else:
        start = steps * (1 - schedule.decay)
        falling = jnp.clip((update - start) / max(steps * schedule.decay, 1.0), 0.0, 1.0)
        factor = 1 - (1 - schedule.final) * falling
    return peak * jnp.where(update < warmup, jnp.minimum(rising, 1.0), factor)
