"""The key/value cache of one block: what a generated token needs of those before it.

A block that sees everything keeps every key and value at its index. One that sees a window, or its own chunk, has
places for that many alone and goes round in them: the token at index i stands at place i mod S.

B rows, T new positions, S places, K key/value heads, H width of one head.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from transformer.model.masks import FAR, Mask
from transformer.parallel.rules import Name, spec


def layout(heads: int) -> tuple[Name, ...]:
    """The logical axes of the keys or values of so many heads; a single one is on every device, for all query heads."""
    return ("batch", "kv_heads" if heads > 1 else None, None, "head_width")


class KeyValues(NamedTuple):
    """Keys and values; place s of a row holds its token at index s. Each head's lie together, as a query reads them.

    Zeros at first: a place that was never written is masked, and zero times a zero weight is zero.
    """

    k_BKSH: jax.Array
    v_BKSH: jax.Array


class View(NamedTuple):
    """A block's cache and the indices of the new tokens, int32 [B, T].

    Those of a row follow one another. A token at FAR is not written: that is how padding behind a prompt is dropped.
    """

    cache: Any
    index_BT: jax.Array


def allocate(rows: int, places: int, kv_heads: int, head_width: int, dtype: Any) -> KeyValues:
    """An empty cache of ``2 * rows * places * kv_heads * head_width`` numbers."""
    shape = (rows, kv_heads, places, head_width)
    return KeyValues(*(jnp.zeros(shape, dtype, out_sharding=spec(*layout(kv_heads))) for _ in range(2)))


def write(cache: KeyValues, places_BT: jax.Array, k_BTKH: jax.Array, v_BTKH: jax.Array) -> KeyValues:
    """The cache with new keys and values at their places; nothing is written past the end."""
    B, _, K, _ = k_BTKH.shape
    where = (jnp.arange(B)[:, None, None], jnp.arange(K)[None, None], places_BT[:, :, None])

    def put(old_BKSH: jax.Array, new_BTKH: jax.Array) -> jax.Array:
        return old_BKSH.at[where].set(new_BTKH, mode="drop", out_sharding=spec(*layout(K)))

    return KeyValues(put(cache.k_BKSH, k_BTKH), put(cache.v_BKSH, v_BTKH))


def read(cache: KeyValues) -> tuple[jax.Array, jax.Array]:
    """Keys and values, each [B, S, K, H]."""
    return cache.k_BKSH.transpose(0, 2, 1, 3), cache.v_BKSH.transpose(0, 2, 1, 3)


def extend(
    view: View, k_BTKH: jax.Array, v_BTKH: jax.Array, mask: Mask, reach: int | None
) -> tuple[KeyValues, jax.Array, jax.Array, Mask]:
    """The cache with new keys and values, and the keys and values [B, S, K, H] that the new queries look at, with their
    mask. ``reach`` is how many keys a query sees at most; None: the cache has a place for every index."""
    if reach is None:
        new = write(view.cache, view.index_BT, k_BTKH, v_BTKH)
        return new, *read(new), mask
    index_BT, S = view.index_BT, view.cache.k_BKSH.shape[2]
    written_BT = index_BT < FAR
    last_B1 = jnp.where(written_BT, index_BT, -1).max(1, keepdims=True)
    # Of many new tokens only the last S stay: two that share a place would be written in no certain order.
    places_BT = jnp.where(written_BT & (index_BT > last_B1 - S), index_BT % S, FAR)
    new = write(view.cache, places_BT, k_BTKH, v_BTKH)
    if k_BTKH.shape[1] == 1:
        index_BS, (k_BSKH, v_BSKH) = indices(last_B1, S), read(new)
    else:  # the first of the new queries see keys that the last of the new tokens have replaced
        old = zip(read(view.cache), (k_BTKH, v_BTKH), strict=True)
        k_BSKH, v_BSKH = (jnp.concatenate(pair, axis=1) for pair in old)
        index_BS = jnp.concatenate([indices(index_BT[:, :1] - 1, S), index_BT], axis=1)
    return new, k_BSKH, v_BSKH, dataclasses.replace(mask, key_index_BS=index_BS, ordered=False)


def indices(last_B1: jax.Array, S: int) -> jax.Array:
    """Whose token stands at each of S places that are gone round in, when that at ``last`` is the newest: int32 [B, S].

    FAR for a place that was never written.
    """
    index_BS = last_B1 - (last_B1 - jnp.arange(S, dtype=jnp.int32)[None]) % S
    return jnp.where(index_BS < 0, FAR, index_BS)
