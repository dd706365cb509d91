"""Multi-query associative recall (arXiv:2312.04927): pairs of a key and its value, then every key again.

    row     a 3 f 1 c 3 | . . | f c a        answers at the second f, c, a: 1, 3, 3

The keys come back in random order, after ``filler`` blanks that keep them far away.
B rows, T positions, P pairs.
"""

import numpy as np

from transformer.data.tasks.draws import Draws, Int64
from transformer.data.tasks.task import Rows, Task, check_least, letters, whole_rows
from transformer.settings import settings


@settings
class Recall(Task):
    """``pairs`` of different keys out of ``keys``, each with any of ``values``; ``filler`` blanks before them again."""

    pairs: int = 8
    keys: int = 32
    values: int = 32
    filler: int = 0

    @property
    def symbols(self) -> tuple[str, ...]:
        return (".", *letters(self.keys), *map(str, range(self.values)))

    @property
    def answers(self) -> range:
        return range(1 + self.keys, 1 + self.keys + self.values)

    @property
    def length(self) -> int:
        return 3 * self.pairs + self.filler

    @property
    def difficulty(self) -> str:
        return "pairs back"

    def check(self) -> None:
        check_least("recall", pairs=(self.pairs, 1), values=(self.values, 2), filler=(self.filler, 0))
        check_least("recall", keys=(self.keys, self.pairs))

    def rows(self, draws: Draws, rows_B: Int64, stream: int) -> Rows:
        B, P, first = len(rows_B), self.pairs, 2 * self.pairs + self.filler
        keys_BP = 1 + draws.order(self.keys)[:, :P]
        values_BP = self.answers.start + draws.below(self.values, P)
        asked_BP = draws.order(P)  # which pair each question is about
        tokens_BT = np.zeros((B, self.length), np.int64)
        tokens_BT[:, 0 : 2 * P : 2], tokens_BT[:, 1 : 2 * P : 2] = keys_BP, values_BP
        tokens_BT[:, first:] = np.take_along_axis(keys_BP, asked_BP, axis=1)
        answers_BT, back_BT = np.zeros_like(tokens_BT), np.zeros_like(tokens_BT)
        answers_BT[:, first:] = np.take_along_axis(values_BP, asked_BP, axis=1)
        back_BT[:, first:] = P - asked_BP
        return whole_rows(tokens_BT, answers_BT, np.arange(self.length) >= first, back_BT)
