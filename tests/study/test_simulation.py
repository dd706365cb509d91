"""What the statistics promise, checked on simulated studies of known truth, through the code that judges real ones.

Every run of a study is a level, what its seed does to all arms alike, and noise of its own; the arms of a study share
their baseline, so their tests depend on each other. Seeds are fixed; a bound is what a true rate passes in all but
one of 10,000 draws.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from scipy import stats

from transformer.study.noise import noise
from transformer.study.power import ALPHA, POWER, seeds_needed, smallest_effect
from transformer.study.statistics import VERDICTS, compare, holm, judge, paired_t

STUDIES = 2500
LEVEL, SD = 1.2, 0.01  # bits per byte, and the noise of one run
PAIRED_SD = 2**0.5 * SD
Draw = Callable[[np.random.Generator, tuple[int, ...]], Any]
# Noise of mean 0 and standard deviation 1.
NOISES: dict[str, Draw] = {
    "normal": lambda random, shape: random.normal(size=shape),
    "heavy": lambda random, shape: random.standard_t(3, size=shape) / 3**0.5,
    "skewed": lambda random, shape: random.exponential(size=shape) - 1,
    # As a score out of 16 is. Differences that take few values are by chance alike more often than normal ones.
    "coarse": lambda random, shape: (random.binomial(16, 0.5, shape) - 8) / 2,
}


def simulate(
    arms: int,
    seeds: int,
    draw: Draw = NOISES["normal"],
    studies: int = STUDIES,
    baseline_sd: float = SD,
    seed_sd: float = 2 * SD,
) -> tuple[Any, Any]:
    """Arms [studies, arms, seeds] and baselines [studies, 1, seeds] that differ by nothing."""
    random = np.random.default_rng([arms, seeds])
    level = LEVEL + seed_sd * random.normal(size=(studies, 1, seeds))
    baseline = level + baseline_sd * draw(random, (studies, 1, seeds))
    return level + SD * draw(random, (studies, arms, seeds)), baseline


def signs(arm: Any, baseline: Any, lower_is_better: bool = True) -> Any:
    """The verdicts of studies, [studies, arms], as the keys of VERDICTS."""
    t = paired_t(arm, baseline)
    return judge(t.mean, holm(t.p), lower_is_better)


def at_most(hits: Any, rate: float) -> bool:
    """Whether so many hits, of one for each study, can come from a true rate no higher."""
    return int(hits.sum()) <= stats.binom.isf(1e-4, len(hits), rate)


def at_least(hits: Any, rate: float) -> bool:
    return at_most(~hits, 1 - rate)


def null_study(arms: int, seeds: int, noise_name: str, studies: int = STUDIES) -> None:
    found = (signs(*simulate(arms, seeds, NOISES[noise_name], studies)) != 0).any(-1)
    assert at_most(found, 0.06 if noise_name == "coarse" else ALPHA), f"{found.mean():.4f}"
    if arms == 1 and noise_name == "normal":
        assert at_least(found, ALPHA), f"{found.mean():.4f}: a test that is too shy"


@pytest.mark.parametrize("noise_name", NOISES)
@pytest.mark.parametrize("seeds", [2, 3, 5, 8, 20])
@pytest.mark.parametrize("arms", [1, 2, 5, 20])
def test_a_study_of_nothing_has_a_false_verdict_in_one_of_twenty_at_most(arms, seeds, noise_name):
    """Also where the noise is not normal but alike in arm and baseline; a coarse metric is allowed 6 %."""
    null_study(arms, seeds, noise_name)


@pytest.mark.exhaustive
@pytest.mark.parametrize("noise_name", NOISES)
@pytest.mark.parametrize("arms", range(1, 21))
def test_a_study_of_nothing_at_any_size(arms, noise_name):
    for seeds in range(2, 21):
        null_study(arms, seeds, noise_name, studies=10_000)


@pytest.mark.parametrize("seeds", [3, 5, 20])
@pytest.mark.parametrize("arms, real", [(2, 1), (5, 2), (5, 4), (20, 10)])
def test_real_effects_do_not_cost_the_other_arms_their_protection(arms, real, seeds):
    """Effects that cannot be missed, on either side, beside arms without one."""
    arm, baseline = simulate(arms, seeds)
    effect = np.where(np.arange(real) % 2, 1, -1) * smallest_effect(PAIRED_SD, seeds, ALPHA / arms, 0.9999)
    arm[:, :real] += effect[:, None]
    verdicts = signs(arm, baseline, lower_is_better=False)
    assert at_least((verdicts[:, :real] == np.sign(effect)).all(-1), 1 - real * 1e-4)
    false = (verdicts[:, real:] != 0).any(-1)
    assert at_most(false, ALPHA)
    if arms - real == 1:
        assert at_least(false, ALPHA), "the last arm is tested at the whole alpha: that is what Holm gains"


@pytest.mark.parametrize("arms", [2, 5, 20])
def test_arms_that_are_dropped_after_a_look_do_not_help_the_others(arms):
    """The worst that can be done: only the arm of the smallest p is kept."""
    arm, baseline = simulate(arms, 5)
    p = paired_t(arm, baseline).p
    arm[p > p.min(-1, keepdims=True)] = np.nan
    assert at_most((signs(arm, baseline) != 0).any(-1), ALPHA)


@pytest.mark.parametrize("arms", [1, 5])
def test_runs_that_are_lost_by_chance_do_no_harm(arms):
    arm, baseline = simulate(arms, 6)
    random = np.random.default_rng(0)
    arm[random.random(arm.shape) < 0.2] = np.nan
    baseline[random.random(baseline.shape) < 0.2] = np.inf
    found = (signs(arm, baseline) != 0).any(-1)
    assert at_most(found, ALPHA)
    assert arms > 1 or at_least(found, ALPHA * 0.9)  # a few studies have fewer than two pairs left


@pytest.mark.parametrize("power", [0.5, POWER, 0.95])
@pytest.mark.parametrize("seeds", [2, 3, 5, 8, 20])
@pytest.mark.parametrize("arms", [1, 2, 5, 20])
def test_a_planted_effect_is_found_as_often_as_predicted(arms, seeds, power):
    """Exactly so with one arm. With more, Bonferroni's share is what Holm gives at least, and alpha is the most."""
    arm, baseline = simulate(arms, seeds)
    effect = float(smallest_effect(PAIRED_SD, seeds, ALPHA / arms, power))
    arm[:, 0] -= effect
    found = signs(arm, baseline)[:, 0] == 1
    assert at_least(found, power), f"{found.mean():.4f}"
    assert arms > 1 or at_most(found, power), f"{found.mean():.4f}"


@pytest.mark.parametrize("arms, ratio", [(1, 0.5), (1, 1.0), (3, 0.7)])
def test_the_seeds_that_are_asked_for_suffice(arms, ratio):
    seeds = seeds_needed(ratio * PAIRED_SD, PAIRED_SD, ALPHA / arms)
    assert seeds is not None
    arm, baseline = simulate(arms, seeds)
    arm[:, 0] += ratio * PAIRED_SD
    assert at_least(signs(arm, baseline)[:, 0] == -1, POWER)


@pytest.mark.parametrize("confidence", [0.8, 0.95, 0.99])
@pytest.mark.parametrize("seeds", [2, 3, 5, 20])
@pytest.mark.parametrize("noise_name", ["normal", "heavy", "skewed"])
def test_intervals_cover_the_truth(noise_name, seeds, confidence):
    """As often as they say under normal noise. Under the others never less at 95 % and above."""
    arm, baseline = simulate(1, seeds, NOISES[noise_name])
    t = paired_t(arm + 0.02, baseline, confidence)
    covers = ((t.low <= 0.02) & (t.high >= 0.02))[:, 0]
    if noise_name == "normal" or confidence >= 0.95:
        assert at_least(covers, confidence), f"{covers.mean():.4f}"
    if noise_name == "normal":
        assert at_most(covers, confidence), f"{covers.mean():.4f}"


@pytest.mark.parametrize(
    "noise_name, baseline_sd, arms, seeds, low, high",
    [
        ("skewed", SD / 100, 1, 5, 0.11, 0.125),
        ("skewed", SD / 100, 1, 20, 0.07, 0.09),
        ("skewed", SD / 100, 20, 5, 0.35, 0.39),
        ("coarse", SD, 3, 4, 0.05, 0.065),
    ],
)
def test_where_the_promise_ends(noise_name, baseline_sd, arms, seeds, low, high):
    """Noise skewed in the arms alone, beside a baseline that hardly varies: false verdicts are far above 5 %.

    Not a wish but a finding, so that the docstring that states it stays true: an arm that is a little better on
    most seeds and much worse on a few has a mean that few seeds do not tell. A coarse metric is a little above.
    """
    false = (signs(*simulate(arms, seeds, NOISES[noise_name], 10_000, baseline_sd)) != 0).any(-1)
    assert low < false.mean() < high


def test_seeds_added_after_looking():
    """Another finding: 5 seeds, and where they resolve nothing 14, give a false verdict in 9 % of null studies."""
    arm, baseline = simulate(1, 14, studies=20_000)
    first, then = signs(arm[..., :5], baseline[..., :5])[:, 0], signs(arm, baseline)[:, 0]
    assert 0.085 < ((first != 0) | (then != 0)).mean() < 0.1


def test_one_study_is_judged_as_the_simulated_ones_are():
    arm, baseline = simulate(5, 6, studies=20)
    arm[:, 1:3] -= 0.03
    arm[arm > LEVEL + 0.05] = np.nan
    t = paired_t(arm, baseline)
    expected = judge(t.mean, holm(t.p), True)
    assert {-1, 0, 1} >= set(expected.ravel()) >= {0, 1}
    for i in range(20):
        study = {f"arm {j}": dict(enumerate(values)) for j, values in enumerate(arm[i])}
        found = compare(study, dict(enumerate(baseline[i, 0])), lower_is_better=True).values()
        assert [c.verdict for c in found] == [VERDICTS[int(sign)] for sign in expected[i]]


def test_the_interval_of_the_noise_covers_its_truth():
    """Under normal noise; heavy tails make it miss far more often, as its docstring warns."""
    cover = {}
    for name in ("normal", "heavy"):
        runs = LEVEL + SD * NOISES[name](np.random.default_rng(0), (2000, 8))
        found = [noise(dict(enumerate(row))) for row in runs]
        cover[name] = np.array([n.sd_low <= SD <= n.sd_high for n in found])
    assert at_least(cover["normal"], 0.95) and at_most(cover["normal"], 0.95)
    assert 0.76 < cover["heavy"].mean() < 0.82


@pytest.mark.parametrize("shared", [0.0, 0.5, 0.9])
def test_what_the_noise_promises_a_study_holds_however_much_its_seeds_share(shared):
    """Exact where a seed does nothing to both runs alike; more is found where it does."""
    run_sd = float(np.hypot(SD, 2 * SD * shared))
    effect = smallest_effect(2**0.5 * run_sd, 5, ALPHA)
    arm, baseline = simulate(1, 5, seed_sd=2 * SD * shared)
    found = signs(arm - effect, baseline)[:, 0] == 1
    assert at_least(found, POWER) and (shared > 0 or at_most(found, POWER))
