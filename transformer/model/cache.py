"""The key/value cache of one block: what a generated token needs of those before it.

A block that sees everything keeps every key and value at its index. One that sees a window, or its own chunk, has
places for that many alone and goes round in them: the token at index i stands at place i mod S. With more places than
that, tokens may be written ahead and turned down again: what they replaced is further back than any query looks.

B rows, T new positions, S places, K key/value heads, H width of one head.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from transformer.model.masks import FAR, Mask
from transformer.parallel.rules import Name, put, spec

LARGEST = 127  # int8 from -127 to 127: as many values on either side of zero


def layout(heads: int) -> tuple[Name, ...]:
    """The logical axes of the keys or values of so many heads; a single one is on every device, for all query heads."""
    return ("batch", "kv_heads" if heads > 1 else None, None, "head_width")


class KeyValues(NamedTuple):
    """Keys and values; place s of a row holds its token at index s. Each head's lie together, as a query reads them.

    Zeros at first: a place that was never written is masked, and zero times a zero weight is zero.
    """

    k_BKSH: jax.Array
    v_BKSH: jax.Array


class Int8KeyValues(NamedTuple):
    """The same in a byte for each number: a token's key or value in a head is divided by its largest size over 127 and
    rounded. That divisor is kept in float32. Absolute maximum, symmetric: arXiv:2208.07339, section 2.1."""

    k_BKSH: jax.Array
    v_BKSH: jax.Array
    k_scale_BKS: jax.Array
    v_scale_BKS: jax.Array


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


def in_int8(empty: KeyValues) -> Int8KeyValues:
    """An empty cache of the same places in int8."""
    scales = (jnp.zeros(x.shape[:3], jnp.float32, out_sharding=spec(*layout(x.shape[1])[:3])) for x in empty)
    return Int8KeyValues(*(x.astype(jnp.int8) for x in empty), *scales)


def stored(cache: Any, k_BTKH: jax.Array, v_BTKH: jax.Array) -> Any:
    """What this kind of cache keeps of keys and values, with tokens where it has places."""
    if isinstance(cache, KeyValues):
        return KeyValues(k_BTKH, v_BTKH)
    (k8_BTKH, k_scale_BTK), (v8_BTKH, v_scale_BTK) = rounded(k_BTKH), rounded(v_BTKH)
    return Int8KeyValues(k8_BTKH, v8_BTKH, k_scale_BTK, v_scale_BTK)


def rounded(x_BTKH: jax.Array) -> tuple[jax.Array, jax.Array]:
    """int8 of each head's numbers, and the float32 scale [B, T, K] that gives them back to half a step."""
    x32 = x_BTKH.astype(jnp.float32)
    scale_BTK = jnp.abs(x32).max(-1) / LARGEST
    steps = x32 / jnp.where(scale_BTK > 0, scale_BTK, 1)[..., None]  # a head of zeros stays zeros
    return jnp.round(steps).astype(jnp.int8), scale_BTK


def numbers(kept: Any, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """Keys and values as they are computed with."""
    if isinstance(kept, KeyValues):
        return kept.k_BKSH, kept.v_BKSH
    pairs = (kept.k_BKSH, kept.k_scale_BKS), (kept.v_BKSH, kept.v_scale_BKS)
    k, v = ((x.astype(jnp.float32) * scale[..., None]).astype(dtype) for x, scale in pairs)
    return k, v


def write(cache: Any, places_BT: jax.Array, k_BTKH: jax.Array, v_BTKH: jax.Array) -> Any:
    """The cache with new keys and values at their places; nothing is written past the end."""
    B, _, K, _ = k_BTKH.shape
    where = (jnp.arange(B)[:, None, None], jnp.arange(K)[None, None], places_BT[:, :, None])

    def at_places(old_BKS: jax.Array, new_BTK: jax.Array) -> jax.Array:
        return old_BKS.at[where].set(new_BTK, mode="drop", out_sharding=spec(*layout(K)[: old_BKS.ndim]))

    return jax.tree.map(at_places, cache, stored(cache, k_BTKH, v_BTKH))


def read(cache: Any, dtype: Any = jnp.float32) -> tuple[jax.Array, jax.Array]:
    """Keys and values, each [B, S, K, H]; of an int8 cache in ``dtype``."""
    k_BKSH, v_BKSH = numbers(cache, dtype)
    return k_BKSH.transpose(0, 2, 1, 3), v_BKSH.transpose(0, 2, 1, 3)


def extend(
    view: View, k_BTKH: jax.Array, v_BTKH: jax.Array, mask: Mask, reach: int | None
) -> tuple[Any, jax.Array, jax.Array, Mask]:
    """The cache with new keys and values, and the keys and values [B, S, K, H] that the new queries look at, with their
    mask. ``reach`` is how many keys a query sees at most; None: the cache has a place for every index."""
    if reach is None:
        new = write(view.cache, view.index_BT, k_BTKH, v_BTKH)
        return new, *read(new, k_BTKH.dtype), mask
    index_BT, S = view.index_BT, view.cache.k_BKSH.shape[2]
    written_BT = index_BT < FAR
    last_B1 = jnp.where(written_BT, index_BT, -1).max(1, keepdims=True)
    # Of many new tokens only the last S stay: two that share a place would be written in no certain order.
    places_BT = jnp.where(written_BT & (index_BT > last_B1 - S), index_BT % S, FAR)
    new = write(view.cache, places_BT, k_BTKH, v_BTKH)
    if k_BTKH.shape[1] == 1:
        index_BS, (k_BSKH, v_BSKH) = indices(last_B1, S), read(new, k_BTKH.dtype)
    else:  # the first of the new queries see keys that the last of the new tokens have replaced
        # New ones as they will be found in the cache, so that it is all the same in what pieces a text is read.
        axes = ("batch", None, layout(k_BTKH.shape[2])[1], "head_width")
        fresh = (put(x, *axes) for x in numbers(stored(view.cache, k_BTKH, v_BTKH), k_BTKH.dtype))
        old = zip(read(view.cache, k_BTKH.dtype), fresh, strict=True)
        k_BSKH, v_BSKH = (jnp.concatenate(pair, axis=1) for pair in old)
        index_BT = put(index_BT, "batch", None)
        index_BS = jnp.concatenate([indices(index_BT[:, :1] - 1, S), index_BT], axis=1)
    return new, k_BSKH, v_BSKH, dataclasses.replace(mask, key_index_BS=index_BS, ordered=False)


def indices(last_B1: jax.Array, S: int) -> jax.Array:
    """Whose token stands at each of S places that are gone round in, when that at ``last`` is the newest: int32 [B, S].

    FAR for a place that was never written.
    """
    index_BS = last_B1 - (last_B1 - jnp.arange(S, dtype=jnp.int32)[None]) % S
    return jnp.where(index_BS < 0, FAR, index_BS)
