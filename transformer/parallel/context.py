"""The positions of a row over the devices of the mesh's ``context`` axis: equal causal work for each.

A causal query at the end of a row sees every key, one at its start a single one. So a row is cut into twice as many
chunks as there are devices, and device i of n holds chunks i and 2n - 1 - i: the layout of the Llama 3 report,
arXiv:2407.21783, section 3.3.2, which also gathers keys and values, as `model.kernels` does.

What is laid out so is the batch, on the host (``arrange``), and the index of each place in masks (``order``).
Everything between looks at one position at a time, or goes by the mask, and sums do not mind the order.
"""

from typing import Any

import numpy as np

from transformer.errors import UserError
from transformer.parallel.rules import shards

AXIS = "context"


def devices() -> int:
    """Over how many devices a row is cut on the mesh that is set."""
    return shards("time")


def order(length: int) -> np.ndarray:
    """The position that stands at each place of a row, int32 [T]; 0, 1, 2, ... where no row is cut."""
    n = devices()
    if n == 1:
        return np.arange(length, dtype=np.int32)
    chunks = np.arange(length, dtype=np.int32).reshape(2 * n, -1)
    return np.concatenate([chunks[i] for device in range(n) for i in (device, 2 * n - 1 - device)])


def arrange(x: Any) -> Any:
    """``x`` [B, T, ...] in position order, laid out for the mesh that is set."""
    return x if devices() == 1 else x[:, order(x.shape[1])]


def check(length: int, count: int) -> None:
    """UserError where rows of ``length`` positions cannot be cut over ``count`` devices."""
    if count > 1 and length % (2 * count):
        raise UserError(
            f"config.model.context: {length} positions do not divide over 2 x mesh.{AXIS}={count}; "
            f"the next that does is {-(-length // (2 * count)) * 2 * count}"
        )
