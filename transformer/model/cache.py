"""The key/value cache: what a generated token needs of those before it.

L blocks, B rows, S places, K key/value heads, H width of one head.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from transformer.parallel.rules import spec

LAYOUT = ("block", "batch", None, "kv_heads", "head_width")


class KeyValues(NamedTuple):
    """Keys and values of every block; place s of a row holds its token at index s.

    Zeros at first: a place that was never written is masked, and zero times a zero weight is zero.
    """

    k_LBSKH: jax.Array
    v_LBSKH: jax.Array


class BlockCache(NamedTuple):
    """One block's view: the cache of all blocks, which block it is, and the places to write, int32 [B, T].

    A place past the end is not written: that is how the padding of a short prompt is dropped.
    """

    all_blocks: Any
    block: int | jax.Array
    places_BT: jax.Array


def allocate(blocks: int, rows: int, places: int, kv_heads: int, head_width: int, dtype: Any) -> KeyValues:
    """An empty cache of ``2 * blocks * rows * places * kv_heads * head_width`` numbers."""
    shape = (blocks, rows, places, kv_heads, head_width)
    return KeyValues(*(jnp.zeros(shape, dtype, out_sharding=spec(*LAYOUT)) for _ in range(2)))


def write(view: BlockCache, k_BTKH: jax.Array, v_BTKH: jax.Array) -> KeyValues:
    """The cache of all blocks with this block's new keys and values at their places."""
    rows_B1 = jnp.arange(k_BTKH.shape[0])[:, None]
    where = (view.block, rows_B1, view.places_BT)
    old = view.all_blocks
    return KeyValues(
        old.k_LBSKH.at[where].set(k_BTKH, mode="drop", out_sharding=spec(*LAYOUT)),
        old.v_LBSKH.at[where].set(v_BTKH, mode="drop", out_sharding=spec(*LAYOUT)),
    )


def read(cache: KeyValues, block: int | jax.Array) -> tuple[jax.Array, jax.Array]:
    """One block's keys and values, each [B, S, K, H]."""
    return cache.k_LBSKH[block], cache.v_LBSKH[block]
