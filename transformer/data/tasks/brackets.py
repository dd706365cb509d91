"""Nested brackets of several kinds (Dyck-k of bounded depth, arXiv:2105.11115): which one has to close next?

    row     ( [ ] { ( ) }      answers: ) ] ) } ) } )   the closing bracket of the innermost one that is open

No answer where nothing is open. Opening and closing are equally likely, but at the bounds; kinds are uniform.
B rows, T positions, S places of the stack.
"""

import numpy as np

from transformer.data.tasks.draws import Draws, Int64
from transformer.data.tasks.task import Rows, Task, check_least, whole_rows
from transformer.errors import UserError
from transformer.settings import settings

PAIRS = ("()", "[]", "{}", "<>", "«»", "‹›", "“”", "‘’")


@settings
class Brackets(Task):
    """Rows of ``text`` brackets of ``kinds`` kinds, at most ``deepest`` of them open at once."""

    kinds: int = 4
    text: int = 64
    deepest: int = 8

    @property
    def symbols(self) -> tuple[str, ...]:
        pairs = PAIRS[: self.kinds]
        return (*(p[0] for p in pairs), *(p[1] for p in pairs))

    @property
    def answers(self) -> range:
        return range(self.kinds, 2 * self.kinds)

    @property
    def length(self) -> int:
        return self.text

    @property
    def difficulty(self) -> str:
        return "open brackets"

    def check(self) -> None:
        check_least("brackets", kinds=(self.kinds, 2), text=(self.text, 1), deepest=(self.deepest, 1))
        if self.kinds > len(PAIRS):
            raise UserError(f"config.data.source.kinds: {self.kinds} is too many for brackets, set up to {len(PAIRS)}")

    def rows(self, draws: Draws, rows_B: Int64, stream: int) -> Rows:
        B, T, every_B = len(rows_B), self.text, np.arange(len(rows_B))
        rises_BT, kinds_BT = draws.below(2, T), draws.below(self.kinds, T)
        stack_BS, open_B = np.zeros((B, self.deepest), np.int64), np.zeros(B, np.int64)
        tokens_BT, answers_BT, depth_BT = (np.zeros((B, T), np.int64) for _ in range(3))
        for t in range(T):
            rises_B = ((rises_BT[:, t] == 1) | (open_B == 0)) & (open_B < self.deepest)
            top_B = stack_BS[every_B, np.maximum(open_B - 1, 0)]
            tokens_BT[:, t] = np.where(rises_B, kinds_BT[:, t], self.kinds + top_B)
            stack_BS[every_B, np.minimum(open_B, self.deepest - 1)] = np.where(
                rises_B, kinds_BT[:, t], stack_BS[every_B, np.minimum(open_B, self.deepest - 1)]
            )
            open_B = open_B + np.where(rises_B, 1, -1)
            answers_BT[:, t] = self.kinds + stack_BS[every_B, np.maximum(open_B - 1, 0)]
            depth_BT[:, t] = open_B
        return whole_rows(tokens_BT, answers_BT, depth_BT > 0, depth_BT)
