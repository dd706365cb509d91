"""Who may look at whom, as values: indices and segment ids, never a stored n x n matrix.

B rows, T query positions, S key positions.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Mask(NamedTuple):
    """A query sees a key that is not later in the row and belongs to the same segment.

    Indices are places in the row (or in the cache), int32 [B or 1, T or S]. Segments are int32 ids
    with 0 for padding, which neither sees nor is seen; None where a row is one segment throughout.
    """

    query_index_BT: jax.Array
    key_index_BS: jax.Array
    query_segment_BT: jax.Array | None = None
    key_segment_BS: jax.Array | None = None

    def visible_BTS(self) -> jax.Array:
        """The mask written out, bool [B or 1, T, S]: for the plain kernel, and for people."""
        seen = self.key_index_BS[:, None, :] <= self.query_index_BT[:, :, None]
        if self.query_segment_BT is not None and self.key_segment_BS is not None:
            query, key = self.query_segment_BT[:, :, None], self.key_segment_BS[:, None, :]
            seen = seen & (query == key) & (query > 0)
        return seen


def causal(length: int, segments_BT: jax.Array | None = None) -> Mask:
    """The mask of whole rows of ``length`` positions."""
    index = jnp.arange(length, dtype=jnp.int32)[None]
    return Mask(index, index, segments_BT, segments_BT)
