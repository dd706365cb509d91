"""The rows of a global batch that this process's devices hold, and the global array made of every process's rows.

A process reads its own rows only; which they are follows from the mesh, so that each row is read wherever a device
holds it and nowhere else. B rows, T positions.
"""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import numpy.typing as npt
from jax.sharding import NamedSharding

from transformer.parallel.context import arrange
from transformer.parallel.rules import spec

Int64 = npt.NDArray[np.int64]


def rows_here(rows: int) -> Int64:
    """The numbers, ascending, of those of ``rows`` that lie on this process's devices of the mesh that is set."""
    layout = _layout(("batch",))
    if layout is None:
        return np.arange(rows)
    places: Any = layout.addressable_devices_indices_map((rows,))
    held = {index[0].indices(rows) for index in places.values()}
    return np.unique(np.concatenate([np.arange(*place, dtype=np.int64) for place in held]))


def place(batch: Any, rows: int | None = None, here: Int64 | None = None) -> Any:
    """A batch of this machine's memory on the devices of the mesh that is set: a tree of arrays [B, T] or [B].

    With ``rows`` and ``here`` the batch is only the rows ``here`` of so many. Positions are given in their order, and
    laid out as `context` has it.
    """
    batch = jax.tree.map(lambda x: arrange(x) if x.ndim > 1 else x, batch)
    layouts = jax.tree.map(lambda x: _layout(("batch", "time")[: x.ndim]), batch)
    if jax.process_count() == 1:
        return jax.device_put(batch, layouts)  # for None, where no mesh is set, it is the first device

    def global_array(x: np.ndarray, layout: NamedSharding) -> jax.Array:
        total = len(x) if rows is None else rows
        held = np.arange(total) if here is None else here

        def part(index: Any) -> np.ndarray:
            wanted = np.arange(*index[0].indices(total))
            return x[np.searchsorted(held, wanted)][:, *index[1:]]

        return jax.make_array_from_callback((total, *x.shape[1:]), layout, part)

    return jax.tree.map(global_array, batch, layouts)


def _layout(names: Sequence[str]) -> NamedSharding | None:
    """None where no mesh is set."""
    layout = spec(*names)
    return None if layout is None else NamedSharding(jax.sharding.get_mesh(), layout)
