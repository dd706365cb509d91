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

from transformer.parallel import context

BIG = 1e30  # finite, so that a row without any visible key cannot make a NaN
FAR = 1 << 30  # the index of a key that no query sees


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["query_index_BT", "key_index_BS", "query_segment_BT", "key_segment_BS"],
    meta_fields=["ordered"],
)
@dataclasses.dataclass(frozen=True)
class Mask:
    """A query sees a key that is not later in the row and belongs to the same segment.

    Indices are places in the row (or in the cache), int32 [B or 1, T or S]. Segments are int32 ids
    with 0 for padding, which neither sees nor is seen; None where a row is one segment throughout.
    ``ordered`` is known before anything runs: query t and key t are both at index t, so a kernel need
    not look at what lies above the diagonal.
    """

    query_index_BT: jax.Array
    key_index_BS: jax.Array
    query_segment_BT: jax.Array | None = None
    key_segment_BS: jax.Array | None = None
    ordered: bool = False

    def visible_BTS(self) -> jax.Array:
        """The mask written out, bool [B or 1, T, S]: for the plain kernel, for a pair of blocks, and for people."""
        seen = self.key_index_BS[:, None, :] <= self.query_index_BT[:, :, None]
        if self.query_segment_BT is not None and self.key_segment_BS is not None:
            query, key = self.query_segment_BT[:, :, None], self.key_segment_BS[:, None, :]
            seen = seen & (query == key) & (query > 0)
        return seen

    def each(self, queries: Callable[[jax.Array], Any], keys: Callable[[jax.Array], Any]) -> Mask:
        """A function of what is known of the queries, and one of what is known of the keys, [B or 1, T or S] each."""
        return Mask(
            queries(self.query_index_BT),
            keys(self.key_index_BS),
            None if self.query_segment_BT is None else queries(self.query_segment_BT),
            None if self.key_segment_BS is None else keys(self.key_segment_BS),
            self.ordered,
        )

    def slice(self, queries: Callable[[jax.Array], jax.Array], keys: Callable[[jax.Array], jax.Array]) -> Mask:
        """The mask of a part of the queries and of the keys, each taken by a function."""
        return dataclasses.replace(self.each(queries, keys), ordered=False)

    def pad(self, queries: int, keys: int) -> Mask:
        """The mask with that many more queries and keys, which nobody sees."""

        def more(x: Any, count: int, value: int) -> Any:
            return None if x is None else jnp.pad(x, ((0, 0), (0, count)), constant_values=value)

        return dataclasses.replace(
            self,
            query_index_BT=more(self.query_index_BT, queries, 0),
            key_index_BS=more(self.key_index_BS, keys, FAR),
            query_segment_BT=more(self.query_segment_BT, queries, 0),
            key_segment_BS=more(self.key_segment_BS, keys, 0),
        )

    def live(self, size: int) -> jax.Array:
        """Of blocks of ``size`` queries and keys: whether any pair may see each other, bool [Q, K]."""

        def bounds(x_BT: jax.Array) -> tuple[jax.Array, jax.Array]:
            x_BNt = x_BT.reshape(x_BT.shape[0], -1, size)
            return x_BNt.min(-1), x_BNt.max(-1)

        _, last_BQ = bounds(self.query_index_BT)
        first_BK, _ = bounds(self.key_index_BS)
        seen_BQK = first_BK[:, None, :] <= last_BQ[:, :, None]
        if self.query_segment_BT is not None and self.key_segment_BS is not None:
            low_BQ, high_BQ = bounds(self.query_segment_BT)
            low_BK, high_BK = bounds(self.key_segment_BS)
            seen_BQK = seen_BQK & (low_BK[:, None, :] <= high_BQ[:, :, None])
            seen_BQK = seen_BQK & (high_BK[:, None, :] >= jnp.maximum(low_BQ, 1)[:, :, None])
        return seen_BQK.any(0)


def causal(length: int, segments_BT: jax.Array | None = None) -> Mask:
    """The mask of whole rows of ``length`` positions, laid out for the mesh that is set."""
    index = jnp.asarray(context.order(length))[None]
    return Mask(index, index, segments_BT, segments_BT, ordered=context.devices() == 1)
