"""Power against the noncentral t distribution read the other way round, and the noise floor against its formulas."""

import json
import math

import numpy as np
import pytest
from scipy import stats

from transformer.errors import UserError
from transformer.study.noise import noise
from transformer.study.power import ALPHA, POWER, SEEDS_CAP, seeds_needed, smallest_effect


def chance(effect: float, sd: float, seeds: int, alpha: float) -> float:
    """Of a t beyond its bar on the side of the effect, averaged over the standard deviations that may be measured."""
    bar, freedom = stats.t.isf(alpha / 2, seeds - 1), seeds - 1
    quantiles = (np.arange(5000) + 0.5) / 5000
    measured = np.sqrt(stats.chi2.ppf(quantiles, freedom) / freedom)  # relative to the true one
    return float(stats.norm.sf(bar * measured - effect / sd * math.sqrt(seeds)).mean())


@pytest.mark.parametrize("power", [0.5, POWER, 0.95])
@pytest.mark.parametrize("arms", [1, 4, 20])
@pytest.mark.parametrize("seeds", [2, 3, 5, 20, 200])
def test_the_smallest_effect_has_the_power_it_is_named_for(seeds, arms, power):
    effect = float(smallest_effect(0.3, seeds, ALPHA / arms, power))
    assert chance(effect, 0.3, seeds, ALPHA / arms) == pytest.approx(power, abs=1e-4)
    noncentrality = effect / 0.3 * math.sqrt(seeds)
    bar = stats.t.isf(ALPHA / arms / 2, seeds - 1)
    assert stats.nct.sf(bar, seeds - 1, noncentrality) == pytest.approx(power, abs=1e-4)


@pytest.mark.parametrize("arms", [1, 4, 20])
@pytest.mark.parametrize("ratio", [0.13, 0.3, 1.0, 3.0, 100.0])
def test_so_many_seeds_suffice_and_one_less_does_not(ratio, arms):
    seeds = seeds_needed(-ratio * 0.3, 0.3, ALPHA / arms)
    assert seeds is not None and chance(ratio, 1, seeds, ALPHA / arms) >= POWER
    assert seeds == 2 or chance(ratio, 1, seeds - 1, ALPHA / arms) < POWER


def test_textbook_numbers():
    """Cohen's one-sample table: at d = 0.5, 34 for power 0.8; at d = 0.8, 15; at d = 0.2, 199."""
    assert [seeds_needed(d, 1, 0.05) for d in (0.5, 0.8, 0.2)] == [34, 15, 199]


def test_more_than_anybody_trains():
    assert seeds_needed(0.0, 1, ALPHA) is None
    assert seeds_needed(0.01, 1, ALPHA) is None
    edge = float(smallest_effect(1, SEEDS_CAP, ALPHA))
    assert seeds_needed(edge * 1.0001, 1, ALPHA) == SEEDS_CAP and seeds_needed(edge * 0.999, 1, ALPHA) is None
    assert seeds_needed(0.5, 1, 0.05, cap=33) is None and seeds_needed(0.5, 1, 0.05, cap=34) == 34


VALUES = {4: 1.21, 0: 1.2, 7: None, 1: 1.23, 3: 1.19, 9: math.inf, 2: 1.22}


def test_the_noise_of_a_configuration():
    found = noise(VALUES)
    x = np.array([1.2, 1.23, 1.22, 1.19, 1.21])
    assert found.seeds == (0, 1, 2, 3, 4) and found.left_out == (7, 9)
    # The interval of a variance, from the sum of squares over quantiles of chi-square.
    squares = ((x - x.mean()) ** 2).sum()
    low, high = squares / stats.chi2.ppf([0.975, 0.025], 4)
    np.testing.assert_allclose(
        [found.mean, found.sd, found.sd_low, found.sd_high, found.sd_unpaired],
        [x.mean(), np.std(x, ddof=1), low**0.5, high**0.5, np.sqrt(2 * squares / 4)],
        rtol=1e-12,
    )
    assert noise(VALUES, 0.8).sd_low > found.sd_low and noise(VALUES, 0.8).sd_high < found.sd_high
    assert json.loads(json.dumps(found.as_dict(), allow_nan=False)) == found.as_dict()


@pytest.mark.parametrize("arms", [1, 3])
@pytest.mark.parametrize("seeds", [2, 5, 12])
def test_what_a_study_could_show_above_the_noise(seeds, arms):
    found = noise(VALUES)
    least = found.smallest_difference(seeds, arms)
    assert chance(least, found.sd * math.sqrt(2), seeds, 0.05 / arms) == pytest.approx(POWER, abs=1e-4)
    assert found.seeds_needed(least * 1.0001, arms) == seeds
    assert found.seeds_needed(least * 1e-4, arms) is None


def test_the_noise_in_words():
    assert noise(VALUES).in_words("bits per byte") == (
        "1.21 bits per byte, standard deviation 0.016 over 5 seeds (95% interval 0.0095 to 0.045); "
        "the difference of two runs of unlike seeds has 0.022, of like seeds as a rule less; "
        "80% of studies of one arm and 5 seeds would find 0.038"
    )


@pytest.mark.parametrize(
    "values, message",
    [
        ({}, "noise: 0 of 0 seeds gave a finite value and two are needed; add seeds"),
        ({0: 1.2, 1: math.nan, 2: None}, "noise: 1 of 3 seeds gave a finite value and two are needed; add seeds"),
        ({0: 1.2, 1: 1.2, 5: 1.2000001}, "noise: all 3 seeds gave 1.2; check that the seed reaches the run"),
    ],
)
def test_what_does_not_vary_is_refused(values, message):
    with pytest.raises(UserError) as error:
        noise(values)
    assert str(error.value) == message
