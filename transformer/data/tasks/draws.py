"""Random numbers as a formula: draw j of row r is a hash of (seed, r, j), so any row can be made by itself.

Integers only, as in `permutation`: the same rows on every machine and with every version of every library.
B rows.
"""

import numpy as np
import numpy.typing as npt

from transformer.data.permutation import mix

Int64 = npt.NDArray[np.int64]
UInt64 = npt.NDArray[np.uint64]


class Draws:
    """The draws of some rows of one stream, one after another; ``name`` keeps streams of one seed apart."""

    def __init__(self, seed: int, rows_B: npt.ArrayLike, name: int = 0):
        stream = np.uint64(mix(mix(seed) + name))
        self._key_B1 = mixed(mixed(np.asarray(rows_B, np.uint64)) ^ stream)[:, None]
        self._used = 0

    def bits(self, *shape: int) -> UInt64:
        """64 random bits for each entry, [B, *shape]."""
        count = int(np.prod(shape, dtype=np.int64))
        index_N = np.arange(self._used, self._used + count, dtype=np.uint64)
        self._used += count
        return mixed(self._key_B1 + mixed(index_N)).reshape(-1, *shape)

    def below(self, limit: npt.ArrayLike, *shape: int) -> Int64:
        """Whole numbers from 0 to ``limit`` - 1 (itself a number or [B, *shape]), uniform to 2^-32, [B, *shape]."""
        high = self.bits(*shape) >> np.uint64(32)
        return ((high * np.asarray(limit, np.uint64)) >> np.uint64(32)).astype(np.int64)

    def order(self, size: int) -> Int64:
        """A permutation of 0 to ``size`` - 1 for each row, [B, size]."""
        return np.argsort(self.bits(size), axis=1, kind="stable")


def mixed(values: UInt64) -> UInt64:
    """``permutation.mix`` of every entry."""
    values = values + np.uint64(0x9E3779B97F4A7C15)  # products and sums wrap by design
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
