"""k-hop induction (arXiv:2402.09268, section 5): follow a chain of "what came after this character the last time?".

    row     2 | a b a c b d a     two hops from the last a: to the c behind the a before it; the last c has none before
    hop     from position p to just behind the latest earlier place (strictly before p) of the character at p
    answer  at every position, the character that k hops lead to; none where a hop finds no earlier place

Characters are uniform, but never twice the same in a row. One hop is what an induction head does in two blocks; in
the paper each further block about doubles the number of hops.
B rows, T positions, C characters.
"""

import numpy as np

from transformer.data.tasks.draws import Draws, Int64
from transformer.data.tasks.task import TRAINING, Rows, Task, check_least, letters, whole_rows
from transformer.settings import settings


@settings
class Hops(Task):
    """``hops``: the most that a row asks for; each row says its own number, 0 to that, before its characters.

    ``text`` characters out of ``characters`` kinds. ``curriculum``: rows of training until one hop more joins,
    beginning with rows of 0 and 1; 0: all from the start.
    """

    hops: int = 8
    characters: int = 4
    text: int = 50
    curriculum: int = 0

    @property
    def symbols(self) -> tuple[str, ...]:
        return (*map(str, range(self.hops + 1)), *letters(self.characters))

    @property
    def answers(self) -> range:
        return range(self.hops + 1, self.hops + 1 + self.characters)

    @property
    def length(self) -> int:
        return self.text + 1

    @property
    def difficulty(self) -> str:
        return "hops"

    def check(self) -> None:
        check_least("hops", hops=(self.hops, 0), characters=(self.characters, 2), curriculum=(self.curriculum, 0))
        check_least("hops", text=(self.text, 2))

    def rows(self, draws: Draws, rows_B: Int64, stream: int) -> Rows:
        most_B = np.full(len(rows_B), self.hops)
        if self.curriculum and stream == TRAINING:
            most_B = np.minimum(1 + rows_B // self.curriculum, self.hops)
        hops_B1 = draws.below(most_B[:, None] + 1, 1)
        # A character is the one before it plus 1 to C - 1, around the alphabet.
        first_B1, moves_BT = draws.below(self.characters, 1), 1 + draws.below(self.characters - 1, self.text - 1)
        text_BT = np.cumsum(np.concatenate([first_B1, moves_BT], axis=1), axis=1) % self.characters
        place_BT = hop_from(text_BT, self.characters)
        at_BT = np.tile(np.arange(self.text), (len(rows_B), 1))
        for hop in range(self.hops):
            next_BT = np.where(at_BT < 0, -1, np.take_along_axis(place_BT, np.maximum(at_BT, 0), axis=1))
            at_BT = np.where(hop < hops_B1, next_BT, at_BT)
        first = self.answers.start
        answers_BT = first + np.take_along_axis(text_BT, np.maximum(at_BT, 0), axis=1)
        tokens_BT = np.concatenate([hops_B1, first + text_BT], axis=1)
        asked_BT = np.concatenate([np.zeros_like(hops_B1), at_BT >= 0], axis=1)
        return whole_rows(tokens_BT, np.concatenate([hops_B1, answers_BT], axis=1), asked_BT, hops_B1)


def hop_from(text_BT: Int64, characters: int) -> Int64:
    """Where one hop leads from each position, [B, T]; -1 where it finds no earlier place."""
    B, T = text_BT.shape
    place_BT, last_BC, every_B = np.empty((B, T), np.int64), np.full((B, characters), -1), np.arange(B)
    for t in range(T):
        last_B = last_BC[every_B, text_BT[:, t]]
        place_BT[:, t] = np.where(last_B < 0, -1, last_B + 1)
        last_BC[every_B, text_BT[:, t]] = t
    return place_BT
