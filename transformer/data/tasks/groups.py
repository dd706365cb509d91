"""Sums around a clock, and the word problem of permutations.

    modular_addition   5 9 =        at the = the answer 5 + 9 modulo 11, which is 3
    permutations       p q r s      at every position the product of all permutations up to it

The first is a table whose cells are either trained on or held out (arXiv:2201.02177). The second, over the 120
permutations of five things, is the hardest problem for which one pass over the row suffices, and no circuit of
constant depth is known (arXiv:2210.10749, arXiv:2404.08819).
B rows, T positions, E elements of the group, N things permuted.
"""

import functools
import itertools

import numpy as np

from transformer.data.permutation import permute
from transformer.data.tasks.draws import Draws, Int64
from transformer.data.tasks.task import TRAINING, Rows, Task, check_least, whole_rows
from transformer.errors import UserError
from transformer.settings import settings


@settings
class ModularAddition(Task):
    """``modulus``; ``share``: of the cells of the table that are trained on. Held-out rows are other cells."""

    modulus: int = 97
    share: float = 0.5

    @property
    def symbols(self) -> tuple[str, ...]:
        return (*map(str, range(self.modulus)), "=")

    @property
    def answers(self) -> range:
        return range(self.modulus)

    @property
    def length(self) -> int:
        return 3

    @property
    def difficulty(self) -> str:
        return "times around"

    def check(self) -> None:
        check_least("modular_addition", modulus=(self.modulus, 2))
        if not 0 < self.trained < self.modulus**2:
            raise UserError(
                f"config.data.source.share: {self.share} leaves no cell of the {self.modulus**2} to train on or to "
                "hold out; set a share between 0 and 1"
            )

    @property
    def trained(self) -> int:
        """How many cells are trained on."""
        return round(self.share * self.modulus**2)

    def rows(self, draws: Draws, rows_B: Int64, stream: int) -> Rows:
        m, cells = self.modulus, self.modulus**2
        drawn_B1 = draws.below(self.trained if stream == TRAINING else cells - self.trained, 1)
        drawn_B1 = drawn_B1 if stream == TRAINING else drawn_B1 + self.trained
        cell_B1 = permute(drawn_B1, cells, 0, 0)  # the same cells for every seed
        a_B1, b_B1 = cell_B1 // m, cell_B1 % m
        tokens_BT = np.concatenate([a_B1, b_B1, np.full_like(a_B1, m)], axis=1)
        answers_BT = np.broadcast_to((a_B1 + b_B1) % m, tokens_BT.shape)
        return whole_rows(tokens_BT, answers_BT, np.arange(3) == 2, (a_B1 + b_B1) // m)


@settings
class Permutations(Task):
    """Rows of ``factors`` permutations of ``things``."""

    things: int = 5
    factors: int = 16

    @property
    def symbols(self) -> tuple[str, ...]:
        return tuple("".join(map(str, p)) for p in itertools.permutations(range(self.things)))

    @property
    def answers(self) -> range:
        return range(len(products(self.things)))

    @property
    def length(self) -> int:
        return self.factors

    @property
    def difficulty(self) -> str:
        return "factors"

    def check(self) -> None:
        check_least("permutations", things=(self.things, 2), factors=(self.factors, 1))
        if self.things > 6:
            raise UserError(f"config.data.source.things: {self.things} have too many permutations, set up to 6")

    def rows(self, draws: Draws, rows_B: Int64, stream: int) -> Rows:
        table_EE = products(self.things)
        tokens_BT = draws.below(len(table_EE), self.factors)
        answers_BT = tokens_BT.copy()
        for t in range(1, self.factors):
            answers_BT[:, t] = table_EE[answers_BT[:, t - 1], tokens_BT[:, t]]
        return whole_rows(tokens_BT, answers_BT, True, np.arange(1, self.factors + 1))


@functools.cache
def products(things: int) -> Int64:
    """``[i, j]`` is permutation i and then permutation j, by their places in alphabetical order: int64 [E, E]."""
    all_EN = np.array(list(itertools.permutations(range(things))))
    digits_N = things ** np.arange(things - 1, -1, -1)  # read as numbers, they ascend
    then_EEN = all_EN[:, all_EN].transpose(1, 0, 2)  # [i, j, n] is where j takes what i takes n to
    return np.searchsorted(all_EN @ digits_N, then_EEN @ digits_N)
