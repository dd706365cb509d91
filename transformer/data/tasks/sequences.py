"""Copy, reverse and sort: a sequence, a bar, and the sequence again in another order.

    row       c a b | c a        answers from the bar on: c a b copied, b a c reversed, a b c sorted

As in text the answers are read as they come: each one but the last is the next token. Rows have 1 to ``most`` symbols.
B rows, T positions, N symbols.
"""

import numpy as np

from transformer.data.tasks.draws import Draws, Int64
from transformer.data.tasks.task import Rows, Task, check_least, letters
from transformer.settings import settings, tag_of


@settings
class Sequence(Task):
    """``most``: symbols of the longest row, each any of ``kinds``."""

    most: int = 16
    kinds: int = 16

    @property
    def symbols(self) -> tuple[str, ...]:
        return ("|", *letters(self.kinds))

    @property
    def answers(self) -> range:
        return range(1, 1 + self.kinds)

    @property
    def length(self) -> int:
        return 2 * self.most

    @property
    def difficulty(self) -> str:
        return "symbols"

    def check(self) -> None:
        check_least(tag_of(type(self)), most=(self.most, 1), kinds=(self.kinds, 2))

    def arranged(self, symbols_BN: Int64, size_B1: Int64) -> Int64:
        """The first ``size`` symbols of each row in the order that is wanted; what is behind them does not matter."""
        raise NotImplementedError

    def rows(self, draws: Draws, rows_B: Int64, stream: int) -> Rows:
        B, N, T = len(rows_B), self.most, self.length
        size_B1 = 1 + draws.below(N, 1)
        symbols_BN = 1 + draws.below(self.kinds, N)
        wanted_BN = self.arranged(symbols_BN, size_B1)
        at_BT = np.tile(np.arange(T), (B, 1))
        nth_BT = np.clip(at_BT - size_B1, 0, N - 1)  # of the answers, from the bar on
        answers_BT = np.take_along_axis(wanted_BN, nth_BT, axis=1)
        before_BT = np.concatenate([np.zeros((B, 1), np.int64), answers_BT[:, :-1]], axis=1)
        given_BT = np.take_along_axis(symbols_BN, np.minimum(at_BT, N - 1), axis=1)
        tokens_BT = np.where(at_BT < size_B1, given_BT, np.where(at_BT == size_B1, 0, before_BT))
        present_BT = at_BT < 2 * size_B1
        asked_BT = present_BT & (at_BT >= size_B1)
        return Rows(tokens_BT, answers_BT, asked_BT, np.broadcast_to(size_B1, (B, T)), present_BT)


@settings
class Copy(Sequence):
    """The same again."""

    def arranged(self, symbols_BN: Int64, size_B1: Int64) -> Int64:
        return symbols_BN


@settings
class Reverse(Sequence):
    """The last first."""

    def arranged(self, symbols_BN: Int64, size_B1: Int64) -> Int64:
        return np.take_along_axis(symbols_BN, np.maximum(size_B1 - 1 - np.arange(self.most), 0), axis=1)


@settings
class Sort(Sequence):
    """In the order of the alphabet."""

    def arranged(self, symbols_BN: Int64, size_B1: Int64) -> Int64:
        behind_BN = np.arange(self.most) >= size_B1
        return np.minimum(np.sort(np.where(behind_BN, self.kinds + 1, symbols_BN), axis=1), self.kinds)
