"""The key/value cache of one block: what a generated token needs of those before it.

B rows, T new positions, S places, K key/value heads, H width of one head.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from transformer.parallel.rules import spec

LAYOUT = ("batch", "kv_heads", None, "head_width")


class KeyValues(NamedTuple):
    """Keys and values; place s of a row holds its token at index s. Each head's lie together, as a query reads them.

    Zeros at first: a place that was never written is masked, and zero times a zero weight is zero.
    """

    k_BKSH: jax.Array
    v_BKSH: jax.Array


class View(NamedTuple):
    """A block's cache and the places to write, int32 [B, T].

    A place past the end is not written: that is how the padding of a short prompt is dropped.
    """

    cache: Any
    places_BT: jax.Array


def allocate(rows: int, places: int, kv_heads: int, head_width: int, dtype: Any) -> KeyValues:
    """An empty cache of ``2 * rows * places * kv_heads * head_width`` numbers."""
    shape = (rows, kv_heads, places, head_width)
    return KeyValues(*(jnp.zeros(shape, dtype, out_sharding=spec(*LAYOUT)) for _ in range(2)))


def write(view: View, k_BTKH: jax.Array, v_BTKH: jax.Array) -> KeyValues:
    """The cache with new keys and values at their places."""
    B, _, K, _ = k_BTKH.shape
    where = (jnp.arange(B)[:, None, None], jnp.arange(K)[None, None], view.places_BT[:, :, None])

    def put(old_BKSH: jax.Array, new_BTKH: jax.Array) -> jax.Array:
        return old_BKSH.at[where].set(new_BTKH, mode="drop", out_sharding=spec(*LAYOUT))

    return KeyValues(put(view.cache.k_BKSH, k_BTKH), put(view.cache.v_BKSH, v_BTKH))


def read(cache: KeyValues) -> tuple[jax.Array, jax.Array]:
    """Keys and values, each [B, S, K, H]."""
    return cache.k_BKSH.transpose(0, 2, 1, 3), cache.v_BKSH.transpose(0, 2, 1, 3)
