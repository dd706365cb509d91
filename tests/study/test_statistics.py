"""The numbers of a comparison against SciPy and against their definitions; edges; what reaches JSON and people."""

import itertools
import json
import math

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy import stats

from transformer.study.statistics import (
    ALPHA,
    FLIPS_CAP,
    RESOLUTION,
    SEEDS_CAP,
    Comparison,
    compare,
    holm,
    judge,
    paired_t,
    sign_flip_p,
)

RANDOM = np.random.default_rng(7)


@pytest.mark.parametrize("lost", [0, 1, 3])
@pytest.mark.parametrize("seeds", [5, 6, 20])
@pytest.mark.parametrize("confidence", [0.8, 0.95])
def test_the_paired_t_test_is_scipys_over_the_pairs_that_are_left(seeds, lost, confidence):
    arms = RANDOM.normal(1.2, 0.1, (4, seeds))
    baseline = RANDOM.normal(1.25, 0.1, seeds)
    broken = [math.nan, math.inf, -math.inf, 1e200]
    for i in range(4):
        arms[i, RANDOM.permutation(seeds)[:lost]] = broken[i]
    t = paired_t(arms, baseline, confidence)
    for i in range(4):
        kept = np.isfinite(arms[i]) & (arms[i] < 1e100)
        assert t.pairs[i] == kept.sum() == seeds - lost
        expected = stats.ttest_rel(arms[i][kept], baseline[kept])
        interval = expected.confidence_interval(confidence)
        difference = arms[i][kept] - baseline[kept]
        np.testing.assert_allclose(
            [t.mean[i], t.sd[i], t.p[i], t.low[i], t.high[i]],
            [difference.mean(), difference.std(ddof=1), expected.pvalue, interval.low, interval.high],
            rtol=1e-9,
        )
        np.testing.assert_array_equal(t.difference[i], np.where(kept, arms[i] - baseline, np.nan))


@pytest.mark.parametrize("arms", [1, 2, 3, 6])
def test_holm_is_the_closure_of_bonferroni(arms):
    """An arm's adjusted p is the largest Bonferroni p of any set of arms that it is in (Marcus et al. 1976)."""
    for _ in range(30):
        p = RANDOM.choice([0.001, 0.01, 0.02, 0.04, 0.5, np.nan, RANDOM.random() ** 3], arms)
        filled = np.where(np.isnan(p), 1, p)
        sets = [s for k in range(1, arms + 1) for s in itertools.combinations(range(arms), k)]
        expected = [max(min(1, len(s) * filled[list(s)].min()) for s in sets if i in s) for i in range(arms)]
        np.testing.assert_allclose(holm(p), np.where(np.isnan(p), np.nan, expected), rtol=1e-12)


def test_holm_keeps_studies_apart():
    p = RANDOM.random((3, 4, 5)) ** 2
    np.testing.assert_array_equal(holm(p), [[holm(row) for row in table] for table in p])


@pytest.mark.parametrize("lower_is_better", [True, False])
def test_the_verdict_is_the_corrected_p_and_the_side(lower_is_better):
    mean = np.array([-0.3, 0.3, -0.3, 0.3, 0.3])
    p = np.array([ALPHA, ALPHA, ALPHA + 1e-9, 1.0, np.nan])
    expected = np.array([1, -1, 0, 0, 0]) if lower_is_better else np.array([-1, 1, 0, 0, 0])
    np.testing.assert_array_equal(judge(mean, p, lower_is_better), expected)


@pytest.mark.parametrize("n", [2, 3, 5, 9, 12])
def test_sign_flips_are_counted_as_scipy_counts_them(n):
    for shift in (0.0, 0.5, 3.0):
        d = RANDOM.normal(shift, 1, n)
        expected = stats.permutation_test((d,), np.mean, permutation_type="samples", n_resamples=np.inf)
        assert sign_flip_p(d) == pytest.approx(expected.pvalue, abs=1e-12)


@pytest.mark.parametrize("n", [2, 4, 7, 10])
def test_sign_flips_that_tie_count(n):
    """Differences in tenths, whose sums meet often and are rounded differently, against whole numbers."""
    for _ in range(20):
        whole = RANDOM.integers(-3, 4, n)
        sums = [abs(np.dot(signs, whole)) for signs in itertools.product([1, -1], repeat=n)]
        expected = np.mean(np.array(sums) >= abs(whole.sum()))
        assert sign_flip_p(whole / 10) == pytest.approx(expected, abs=1e-12)


def test_sign_flips_of_many_seeds():
    """At 20 a written-out count; at the cap, equal differences, of which the binomial tells the tail; beyond, none."""
    d = RANDOM.normal(0.4, 1, 20)
    sums = np.zeros(1)
    for x in d:
        sums = np.add.outer(sums, [x, -x]).ravel()
    assert sign_flip_p(d) == pytest.approx(np.mean(np.abs(sums) >= abs(d.sum()) - 1e-9), abs=1e-12)
    d = np.where(np.arange(FLIPS_CAP) < 12, -1.0, 1.0)
    assert sign_flip_p(d) == pytest.approx(2 * stats.binom.cdf(12, FLIPS_CAP, 0.5), rel=1e-9)
    assert sign_flip_p(np.ones(FLIPS_CAP + 1)) is None
    assert sign_flip_p(np.ones(1)) is None and sign_flip_p(np.ones(0)) is None


BASELINE = {seed: 1.2 + 0.013 * seed**0.5 for seed in range(5)}
ULP = 2.0**-23  # of float32, relative
NOT_TESTED = {
    "itself": (lambda v, s: v, 1.0, "equal to the baseline on every seed"),
    "an ulp of float64 away": (lambda v, s: math.nextafter(v, 2), 1.0, "equal to the baseline on every seed"),
    "two ulps of float32 away": (lambda v, s: v * (1 + 2 * ULP), 1.0, "equal to the baseline on every seed"),
    "shifted": (lambda v, s: v + 0.01, None, "the same difference on every seed"),
    "shifted, and rounded": (lambda v, s: float(np.float32(v + 0.01)), None, "the same difference on every seed"),
    "gone": (lambda v, s: None, None, "seeds finished on both sides: 0"),
    "diverged but once": (lambda v, s: 1.0 if s == 2 else math.nan, None, "seeds finished on both sides: 1"),
}


@pytest.mark.parametrize("case", NOT_TESTED)
def test_what_no_t_test_can_tell_is_not_resolved_and_says_why(case):
    change, p, reason = NOT_TESTED[case]
    arm = {seed: change(value, seed) for seed, value in BASELINE.items()}
    found = compare({case: arm}, BASELINE, lower_is_better=True)[case]
    assert found.verdict == "not resolved" and found.p == found.p_holm == p
    assert found.reason is not None and found.reason.startswith(reason) and reason in found.in_words("bits")
    assert (found.low, found.high, found.smallest_effect, found.seeds_needed) == (None,) * 4
    if found.sign_flip_p is not None:
        assert found.sign_flip_p == (1 if found.difference == 0 else 0.0625)


def test_differences_that_vary_by_more_than_rounding_are_tested():
    arm = {seed: value * (1 + (20 + 5 * (seed % 2)) * ULP) for seed, value in BASELINE.items()}
    found = compare({"arm": arm}, BASELINE, lower_is_better=True)["arm"]
    assert found.reason is None and found.verdict == "worse" and 0 < found.p < 0.01
    assert RESOLUTION == 4 * ULP


def test_the_interval_is_as_wide_as_asked_and_the_verdict_the_same():
    arm = {seed: value - 0.01 * (1 + seed % 3) for seed, value in BASELINE.items()}
    for confidence in (0.5, 0.95, 0.999):
        found = compare({"arm": arm}, BASELINE, lower_is_better=True, confidence=confidence)["arm"]
        expected = stats.ttest_rel(list(arm.values()), list(BASELINE.values())).confidence_interval(confidence)
        np.testing.assert_allclose([found.low, found.high], expected, rtol=1e-9)
        assert found.confidence == confidence and found.verdict == "better"


def test_an_arm_that_fails_still_counts_in_the_correction():
    good = {seed: value - 0.02 - 0.004 * (seed % 2) for seed, value in BASELINE.items()}
    p = compare({"good": good}, BASELINE, lower_is_better=True)["good"].p
    beside = compare({"good": good, "failed": {}, "gone": {1: None}}, BASELINE, lower_is_better=True)
    assert beside["good"].p_holm == pytest.approx(3 * p) and beside["good"].arms == 3
    assert beside["failed"].p_holm is None and beside["failed"].left_out == (0, 1, 2, 3, 4)
    assert compare({}, BASELINE, lower_is_better=True) == {}


values = st.one_of(st.none(), st.floats(), st.floats(1, 1.5), st.sampled_from([1.0, 1.1, 1.1 + 1e-9, 0.0]))
results = st.dictionaries(st.integers(0, 7), values, max_size=8)


@settings(max_examples=100, deadline=None)
@example(arms={"a": {0: 1e-200, 1: 3e-200}}, baseline={0: 2e-200, 1: 1e-200}, lower=True)  # their squares are zero
@given(arms=st.dictionaries(st.text("abc", min_size=1), results, max_size=4), baseline=results, lower=st.booleans())
def test_whatever_the_runs_gave(arms, baseline, lower):
    found = compare(arms, baseline, lower_is_better=lower)
    other = compare(arms, baseline, lower_is_better=not lower)
    mixed = compare(
        {name: dict(reversed(arms[name].items())) for name in reversed(arms)},
        dict(reversed(baseline.items())),
        lower_is_better=lower,
    )
    assert list(found) == list(arms) and mixed == found, "the order of seeds and arms does not matter"
    everything = set(baseline).union(*arms.values())
    for name, c in found.items():
        record = json.loads(json.dumps(c.as_dict(), allow_nan=False))
        assert record == c.as_dict() and c.verdict in c.in_words("bits per byte")
        assert Comparison(**{**record, "seeds": c.seeds, "left_out": c.left_out}) == c
        assert set(c.seeds) | set(c.left_out) == everything and not set(c.seeds) & set(c.left_out)
        resolved = c.p_holm is not None and c.p_holm <= 0.05
        assert (c.verdict != "not resolved") == resolved
        if resolved:
            assert (c.verdict == "better") == ((c.difference < 0) == lower)
        elif c.seeds_needed is not None:
            assert c.seeds_needed > len(c.seeds), "or the study would have been enough"
        assert {c.verdict, other[name].verdict} in ({"better", "worse"}, {"not resolved"})
        if c.low is not None:
            assert c.low <= c.difference <= c.high and c.p <= c.p_holm <= 1
            assert (c.p < 0.05) == (not c.low <= 0 <= c.high) or c.p == pytest.approx(0.05)
        if len(c.seeds) >= 2:
            assert c.least_sign_flip_p == 2.0 ** (1 - len(c.seeds)) <= c.sign_flip_p <= 1


def test_the_sentences():
    """One for each kind of outcome, whole."""
    base = dict.fromkeys(range(6), 1.0)
    arms = {
        "good": dict(enumerate([0.96, 0.97, 0.975, 0.965, 0.97])),
        "unsure": dict(enumerate([0.99, 1.01, 0.98, 0.985, 1.0, 0.98])),
        "nothing": dict(enumerate([0.99, 1.01, 0.98, 1.0201])),
    }
    found = compare(arms, base, lower_is_better=True)
    assert found["good"].in_words("bits per byte") == (
        "better: -0.032 bits per byte (95% interval -0.0391 to -0.0249), p 0.000696 after Holm over 3 arms; "
        "sign-flip p 0.0625 (the least that 5 seeds allow); without seed 5"
    )
    assert found["unsure"].in_words("bits per byte") == (
        "not resolved: -0.00917 bits per byte (95% interval -0.0218 to +0.00343), p 0.241 after Holm over 3 arms; "
        "sign-flip p 0.188 (6 seeds); 80% of such studies would find 0.023; "
        "a study of about 21 seeds would settle a difference of this size"
    )
    assert f"a study of more than {SEEDS_CAP} seeds would" in found["nothing"].in_words("bits per byte")
    alone = compare({"good": arms["good"]}, base, lower_is_better=False)["good"].in_words("points")
    assert alone.startswith("worse: -0.032 points") and "after Holm over 1 arm;" in alone
