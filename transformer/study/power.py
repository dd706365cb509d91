"""What seeds can show: the smallest effect that so many could have shown, and how many an effect needs.

A paired t test of n differences with true mean d and standard deviation s follows the noncentral t distribution with
n - 1 degrees of freedom and noncentrality d / s * sqrt(n) (Cohen, Statistical Power Analysis, 1988, chapter 2).
Power is here the chance of the right verdict: that the test is passed on the side where the effect lies.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import special, stats

ALPHA = 0.05  # of a whole study: the chance of any false verdict in it
POWER = 0.8  # the chance with which an effect is to be found
SEEDS_CAP = 1000  # nobody trains more


def smallest_effect(sd: npt.ArrayLike, seeds: npt.ArrayLike, alpha: float, power: float = POWER) -> Any:
    """The difference that ``seeds`` pairs show with chance ``power``, in the unit of ``sd``; arrays broadcast.

    ``sd`` is that of the paired differences, ``alpha`` that of one two-sided test. In a study of m arms take
    ALPHA / m, Bonferroni's share: Holm never asks for more than that of any arm, and may ask for less, so the
    effect is found with at least this chance. ``sd`` is taken as if it were known: estimated from few seeds, it
    makes the result as uncertain as it is itself.
    """
    freedom = np.asarray(seeds) - 1
    assert np.all(freedom >= 1) and 0 < alpha < 1 and alpha / 2 < power < 1
    bar = stats.t.isf(alpha / 2, freedom)
    return special.nctdtrinc(freedom, 1 - power, bar) * np.asarray(sd) / np.sqrt(freedom + 1)


def seeds_needed(effect: float, sd: float, alpha: float, power: float = POWER, cap: int = SEEDS_CAP) -> int | None:
    """The fewest paired seeds that show ``effect`` with chance ``power``; None where it would take more than ``cap``.

    Meant for a new study. Adding seeds to one that has been looked at, until it is resolved, gives the noise more
    chances than one: see ``test_seeds_added_after_looking``.
    """
    seeds = np.arange(2, cap + 1)
    enough = smallest_effect(sd, seeds, alpha, power) <= abs(effect)  # once enough, more seeds are enough too
    return int(seeds[np.argmax(enough)]) if enough.any() else None
