"""Who may look at whom, as values: indices and segment ids, never a stored n x n matrix.

B rows, T query positions, S key positions, Q blocks of queries, K blocks of keys.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from transformer.parallel import context

BIG = 1e30  # finite, so that a row without any visible key cannot make a NaN
FAR = 1 << 30  # the index of a key that no query sees


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=[
        "query_index_BT",
        "key_index_BS",
        "query_segment_BT",
        "key_segment_BS",
        "query_position_BT",
        "key_position_BS",
    ],
    meta_fields=["ordered", "window", "chunk"],
)
@dataclasses.dataclass(frozen=True)
class Mask:
    """A query sees a key that is not later in the row and belongs to the same segment.

    Indices are places in the row (or in the cache), int32 [B or 1, T or S]. Segments are int32 ids
    with 0 for padding, which neither sees nor is seen; None where a row is one segment throughout.
    With a ``window`` it sees the last so many places alone, with a ``chunk`` those of its own chunk, which is counted
    by the positions in the text; None where those are the indices.
    ``ordered`` is known before anything runs: query t and key t are both at index t, so a kernel need
    not look at what lies above the diagonal.
    """

    query_index_BT: jax.Array
    key_index_BS: jax.Array
    query_segment_BT: jax.Array | None = None
    key_segment_BS: jax.Array | None = None
    query_position_BT: jax.Array | None = None
    key_position_BS: jax.Array | None = None
    ordered: bool = False
    window: int | None = None
    chunk: int | None = None

    def visible_BTS(self) -> jax.Array:
        """The mask written out, bool [B or 1, T, S]: for the plain kernel, for a pair of blocks, and for people."""
        distance = self.distance_BTS()
        seen = distance >= 0
        if self.window is not None:
            seen = seen & (distance < self.window)
        if self.chunk is not None:
            query, key = self.chunks()
            seen = seen & (query[:, :, None] == key[:, None, :])
        if self.query_segment_BT is not None and self.key_segment_BS is not None:
            query, key = self.query_segment_BT[:, :, None], self.key_segment_BS[:, None, :]
            seen = seen & (query == key) & (query > 0)
        return seen

    def distance_BTS(self) -> jax.Array:
        """How many places a key lies before a query, int32 [B or 1, T, S]."""
        return self.query_index_BT[:, :, None] - self.key_index_BS[:, None, :]

    def chunks(self) -> tuple[jax.Array, jax.Array]:
        """The numbers of the queries' chunks and of the keys'."""
        assert self.chunk is not None
        query = self.query_index_BT if self.query_position_BT is None else self.query_position_BT
        key = self.key_index_BS if self.key_position_BS is None else self.key_position_BS
        return query // self.chunk, key // self.chunk

    def each(self, queries: Callable[[jax.Array], Any], keys: Callable[[jax.Array], Any]) -> Mask:
        """A function of what is known of the queries, and one of what is known of the keys, [B or 1, T or S] each."""
        changed = {
            field.name: (queries if field.name.startswith("query") else keys)(value)  # type: ignore[arg-type]
            for field in dataclasses.fields(self)
            if isinstance(value := getattr(self, field.name), jax.Array | np.ndarray)
        }
        return dataclasses.replace(self, **changed)

    def slice(self, queries: Callable[[jax.Array], jax.Array], keys: Callable[[jax.Array], jax.Array]) -> Mask:
        """The mask of a part of the queries and of the keys, each taken by a function."""
        return dataclasses.replace(self.each(queries, keys), ordered=False)

    def pad(self, queries: int, keys: int) -> Mask:
        """The mask with that many more queries and keys, which nobody sees."""

        def more(count: int) -> Callable[[jax.Array], jax.Array]:
            return lambda x: jnp.pad(x, ((0, 0), (0, count)))

        padded = self.each(more(queries), more(keys))
        far = jnp.pad(self.key_index_BS, ((0, 0), (0, keys)), constant_values=FAR)
        return dataclasses.replace(padded, key_index_BS=far)

    def live(self, size: int) -> jax.Array:
        """Of blocks of ``size`` queries and keys: whether any pair may see each other, bool [Q, K]."""

        def bounds(x_BT: jax.Array) -> tuple[jax.Array, jax.Array]:
            x_BNt = x_BT.reshape(x_BT.shape[0], -1, size)
            return x_BNt.min(-1), x_BNt.max(-1)

        first_BQ, last_BQ = bounds(self.query_index_BT)
        first_BK, last_BK = bounds(self.key_index_BS)
        seen_BQK = first_BK[:, None, :] <= last_BQ[:, :, None]
        if self.window is not None:
            seen_BQK = seen_BQK & (last_BK[:, None, :] > first_BQ[:, :, None] - self.window)
        pairs: list[Any] = [(*self.chunks(), 0)] if self.chunk is not None else []
        pairs += [(self.query_segment_BT, self.key_segment_BS, 1)] if self.query_segment_BT is not None else []
        for query, key, least in pairs:
            low_BQ, high_BQ = bounds(query)
            low_BK, high_BK = bounds(key)
            seen_BQK = seen_BQK & (low_BK[:, None, :] <= high_BQ[:, :, None])
            seen_BQK = seen_BQK & (high_BK[:, None, :] >= jnp.maximum(low_BQ, least)[:, :, None])
        return seen_BQK.any(0)


def causal(length: int, segments_BT: jax.Array | None = None) -> Mask:
    """The mask of whole rows of ``length`` positions, laid out for the mesh that is set."""
    index = jnp.asarray(context.order(length))[None]
    return Mask(index, index, segments_BT, segments_BT, ordered=context.devices() == 1)
