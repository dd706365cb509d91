"""The noise floor: how much one configuration varies from seed to seed, and what that lets a study show."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from scipy import stats

from transformer.errors import UserError
from transformer.study import power
from transformer.study.statistics import CONFIDENCE, RESOLUTION, usable


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Noise:
    """In the metric's unit, over the seeds that gave a finite value.

    ``sd_low`` and ``sd_high`` are the limits of its chi-square interval, which trusts that the noise is normal
    (under a t distribution with 3 degrees of freedom, 8 seeds' 95 % interval covers the truth in 79 % of cases).
    ``sd_unpaired`` is that of the difference of two runs of unlike seeds, sqrt(2) ``sd``. An arm and the baseline
    with the same seed differ by less, as far as what is a good seed for one is a good one for the other; how much
    less, only a study can tell. So what follows from it below is an upper bound, unless the arm is itself noisier
    than what was repeated here.
    """

    seeds: tuple[int, ...]
    left_out: tuple[int, ...]
    mean: float
    sd: float
    sd_low: float
    sd_high: float
    sd_unpaired: float
    confidence: float

    def smallest_difference(self, seeds: int, arms: int = 1) -> float:
        """What a study of so many seeds and arms (the baseline not counted) shows with chance POWER."""
        return float(power.smallest_effect(self.sd_unpaired, seeds, power.ALPHA / arms))

    def seeds_needed(self, difference: float, arms: int = 1) -> int | None:
        """The seeds with which such a study shows a wanted difference; None where it takes more than SEEDS_CAP."""
        return power.seeds_needed(difference, self.sd_unpaired, power.ALPHA / arms)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**dataclasses.asdict(self), "seeds": list(self.seeds), "left_out": list(self.left_out)}

    def in_words(self, unit: str) -> str:
        """One line for people, for a study of one arm with as many seeds."""
        n = len(self.seeds)
        return (
            f"{self.mean:.5g} {unit}, standard deviation {self.sd:.2g} over {n} seeds "
            f"({self.confidence:.0%} interval {self.sd_low:.2g} to {self.sd_high:.2g}); "
            f"the difference of two runs of unlike seeds has {self.sd_unpaired:.2g}, of like seeds as a rule less; "
            f"{power.POWER:.0%} of studies of one arm and {n} seeds would find {self.smallest_difference(n):.2g}"
        )


def noise(values: Mapping[int, float | None], confidence: float = CONFIDENCE) -> Noise:
    """From the metric of each seed of one configuration. Refuses what does not vary."""
    seeds = sorted(values)
    x = np.array([values[seed] for seed in seeds], float)  # None becomes NaN
    kept = usable(x)
    n, x = int(kept.sum()), x[kept]
    if n < 2:
        raise UserError(f"noise: {n} of {len(seeds)} seeds gave a finite value and two are needed; add seeds")
    if np.ptp(x) <= RESOLUTION * np.abs(x).max():
        raise UserError(f"noise: all {n} seeds gave {x[0]:.6g}; check that the seed reaches the run")
    sd = float(x.std(ddof=1))
    tails = (1 - confidence) / 2, (1 + confidence) / 2
    low, high = (sd * math.sqrt((n - 1) / stats.chi2.isf(tail, n - 1)) for tail in tails)
    return Noise(
        seeds=tuple(seed for seed, keep in zip(seeds, kept, strict=True) if keep),
        left_out=tuple(seed for seed, keep in zip(seeds, kept, strict=True) if not keep),
        mean=float(x.mean()),
        sd=sd,
        sd_low=low,
        sd_high=high,
        sd_unpaired=math.sqrt(2) * sd,
        confidence=confidence,
    )
