"""Which source gives which row: a fixed cycle in which each source comes up in its share, evenly spread.

The cycle is known in advance, so how many rows each source gave before global row g is a formula.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from transformer.errors import UserError

Int64 = npt.NDArray[np.int64]
CYCLE = 4096


class Mixture:
    """Shares of rows for N sources. ``shares`` are the exact ones: multiples of 1/4096, never 0."""

    def __init__(self, weights: Sequence[float]):
        """Raises UserError for a share below 1/4096, which the cycle cannot hold."""
        sources, total = len(weights), float(sum(weights))
        if sources == 1:
            cycle, counts = 1, [1]
        else:
            cycle = CYCLE
            exact = [w / total * cycle for w in weights]
            if min(exact) < 1:
                raise UserError(
                    f"data.weights: source {exact.index(min(exact)) + 1} of {sources} has "
                    f"{min(exact) / cycle:.2g} of the rows, the least is 1/{cycle}: set data.weights"
                )
            counts = [int(x) for x in exact]
            by_remainder = sorted(range(sources), key=lambda i: (counts[i] - exact[i], i))
            for i in by_remainder[: cycle - sum(counts)]:
                counts[i] += 1
        self.cycle = cycle
        self.counts_N = np.array(counts, np.int64)
        self.shares = tuple(c / cycle for c in counts)
        # Smooth weighted round robin: each turn every source gains its count, the richest gives a row
        # and pays the cycle's length.
        credit_N = np.zeros(sources, np.int64)
        self.pattern_C = np.zeros(cycle, np.int64)
        for turn in range(cycle):
            credit_N += self.counts_N
            self.pattern_C[turn] = chosen = int(np.argmax(credit_N))
            credit_N[chosen] -= cycle
        given_CN = self.pattern_C[:, None] == np.arange(sources)
        self._before_CN = np.cumsum(given_CN, axis=0) - given_CN

    def at(self, row: Int64) -> tuple[Int64, Int64]:
        """For global rows (int64 [B]): (source_B, nth_B), the source and how many rows it gave before."""
        turn_B = row % self.cycle
        source_B = self.pattern_C[turn_B]
        return source_B, row // self.cycle * self.counts_N[source_B] + self._before_CN[turn_B, source_B]
