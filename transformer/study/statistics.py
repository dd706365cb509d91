"""Is an arm better than the baseline? Paired differences over seeds, a t test, Holm's correction, and a verdict.

Every arm is trained with the baseline's seeds, so that arm minus baseline, seed by seed, is free of what a seed does
to both. The verdict comes from the two-sided paired t test alone, corrected over the arms of the study. The sign-flip
test stands beside it, as it trusts nothing about the shape of the noise, and never decides, as few seeds cannot
bring it below 0.05. The first half of the file works on arrays [..., seeds] and is what simulations run through.

What holds, by simulation (tests/study/test_simulation.py): in a study of nothing the chance of any false verdict is
at most 5 %, for 1 to 20 arms and 2 to 20 seeds, under normal and heavy-tailed noise, and under skewed noise that arm
and baseline share; at most 6 % where the metric is as coarse as a score out of 16. What does not hold: noise skewed
in the arms alone, beside a quiet baseline (an arm that is bad on a few seeds), makes false verdicts in 12 % of
studies of one arm and 5 seeds and in 36 % of those of 20 arms; and seeds added because the first ones resolved
nothing (5, then 14) in 9 %. Plan the seeds, then look.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from scipy import stats

from transformer.study.power import ALPHA, POWER, SEEDS_CAP, seeds_needed, smallest_effect

Array = npt.NDArray[Any]
Verdict = Literal["better", "worse", "not resolved"]
VERDICTS: dict[int, Verdict] = {1: "better", -1: "worse", 0: "not resolved"}
CONFIDENCE = 0.95
RESOLUTION = 4 * 2.0**-23  # metrics come out of float32 arithmetic: this share of a value may be rounding
LARGEST = 1e100  # a metric beyond it has diverged as one that is infinite has, and its square might be that
FLIPS_CAP = 40  # seeds of which all sign patterns are counted, through 2^20 sums of either half


class PairedT(NamedTuple):
    """Arrays of shape [...], ``difference`` [..., seeds]. NaN where there is nothing to say."""

    difference: Array  # arm - baseline; NaN where a pair is left out
    pairs: Array
    mean: Array
    sd: Array
    low: Array
    high: Array
    p: Array


def usable(values: Array) -> npt.NDArray[np.bool_]:
    """Which values are finite, and not absurd."""
    return np.abs(values) < LARGEST


def paired_t(arm: npt.ArrayLike, baseline: npt.ArrayLike, confidence: float = CONFIDENCE) -> PairedT:
    """The paired t test (Student 1908) and its interval over the last axis of two arrays [..., seeds] that broadcast.

    A pair of which one value is NaN, infinite or absurd is left out. A difference within rounding (RESOLUTION)
    counts as none. Where there is none at all, p is 1. Where all are the same but not zero, to within rounding,
    there is no p: t would be infinite, but what does not vary says nothing about how it varies, and as a rule it
    means that the seeds did not reach the runs. In both cases there is no interval.
    """
    arm, baseline = np.broadcast_arrays(np.asarray(arm, float), np.asarray(baseline, float))
    paired = usable(arm) & usable(baseline)
    arm, baseline = np.where(paired, arm, 0), np.where(paired, baseline, 0)
    rounding = RESOLUTION * np.maximum(np.abs(arm), np.abs(baseline))
    difference = np.where(np.abs(arm - baseline) <= rounding, 0, arm - baseline)
    pairs = paired.sum(-1)
    with np.errstate(invalid="ignore", divide="ignore"):  # too few pairs make NaN, as promised
        mean = difference.sum(-1) / pairs
        residual = np.where(paired, difference - mean[..., None], 0)
        sd = np.sqrt((residual**2).sum(-1) / (pairs - 1))
    spread = residual.max(-1, initial=0) - residual.min(-1, initial=0)  # residuals lie on both sides of zero
    varies = (pairs > 1) & (spread > rounding.max(-1, initial=0)) & (sd > 0)
    error = np.divide(sd, np.sqrt(pairs), where=varies, out=np.full(mean.shape, np.nan))
    reach = stats.t.isf((1 - confidence) / 2, pairs - 1) * error
    p = np.where((pairs > 1) & ~difference.any(-1), 1, 2 * stats.t.sf(np.abs(mean) / error, pairs - 1))
    return PairedT(np.where(paired, difference, np.nan), pairs, mean, sd, mean - reach, mean + reach, p)


def holm(p: Array) -> Array:
    """Adjusted p of the arms of a study [..., arms]; whoever is at or below alpha is resolved (Holm 1979).

    It bounds the chance of any false verdict however the arms depend on each other, as they do through the
    baseline they share. Each arm that was planned counts: one without p (NaN) is taken as p = 1, so that what
    fails, or is dropped, does not make the others look better. The baseline is no test.
    """
    filled = np.where(np.isnan(p), 1, p)
    order = np.argsort(filled, -1)
    factors = np.arange(p.shape[-1], 0, -1)  # the smallest p must pass alpha / m, the next alpha / (m - 1), ...
    steps = np.maximum.accumulate(np.take_along_axis(filled, order, -1) * factors, -1)  # ... until one fails
    adjusted = np.empty_like(filled)
    np.put_along_axis(adjusted, order, np.minimum(steps, 1), -1)
    return np.where(np.isnan(p), np.nan, adjusted)


def judge(mean: Array, p_holm: Array, lower_is_better: bool) -> Array:
    """1 better, -1 worse, 0 not resolved; the keys of VERDICTS."""
    return np.where(p_holm <= ALPHA, np.sign(-mean if lower_is_better else mean), 0)


def sign_flip_p(difference: Array) -> float | None:
    """The share of the 2^n sign patterns of ``difference`` [n] with an absolute mean no smaller than the observed one.

    Exact if the differences are symmetric about zero, whatever else they are (Fisher 1935). All patterns are
    counted, none drawn: the sums of either half of the seeds, and by sorting how many pairs of them reach far
    enough. None for fewer than two seeds or more than FLIPS_CAP.
    """
    n = difference.size
    if not 2 <= n <= FLIPS_CAP:
        return None
    left, right = _signed_sums(difference[: n // 2]), np.sort(_signed_sums(difference[n // 2 :]))
    # Sums that are equal but for the order of their terms are ties.
    bar = abs(difference.sum()) - 1e-9 * np.abs(difference).sum()
    above = int((right.size - np.searchsorted(right, bar - left)).sum())
    return min(1.0, 2 * above / 2**n)  # for each pattern above there is its opposite below


def _signed_sums(x: Array) -> Array:
    """The sums of ``x`` [n] under all 2^n patterns of signs."""
    sums = np.zeros(1)
    for value in x:
        sums = np.concatenate([sums + value, sums - value])
    return sums


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """One arm beside the baseline, in the metric's unit. None where the seeds do not give it."""

    arms: int  # of the study, the baseline not counted: what p_holm is corrected for
    seeds: tuple[int, ...]  # that both finished
    left_out: tuple[int, ...]  # that one of them lacks, or ended with no finite value
    difference: float | None  # mean of arm - baseline
    sd: float | None  # of the differences, from seed to seed
    low: float | None  # interval of the mean difference, of this arm by itself
    high: float | None
    confidence: float
    p: float | None
    p_holm: float | None
    verdict: Verdict
    reason: str | None  # why nothing could be tested
    sign_flip_p: float | None
    least_sign_flip_p: float | None  # that so many seeds allow: 2 / 2^n
    smallest_effect: float | None  # that these seeds show with chance POWER at ALPHA / arms
    seeds_needed: int | None  # for a difference as observed; None beside a smallest_effect: more than SEEDS_CAP

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**dataclasses.asdict(self), "seeds": list(self.seeds), "left_out": list(self.left_out)}

    def in_words(self, unit: str) -> str:
        """One line for people."""
        n, parts = len(self.seeds), []
        if self.reason is not None:
            parts.append(self.reason)
        if self.difference is not None:
            parts.append(f"{self.difference:+.3g} {unit}")
        if self.low is not None and self.high is not None:
            parts[-1] += f" ({self.confidence:.0%} interval {self.low:+.3g} to {self.high:+.3g})"
        if self.p_holm is not None:
            parts[-1] += f", {_p(self.p_holm)} after Holm over {self.arms} arm{'s' if self.arms > 1 else ''}"
        if self.sign_flip_p is not None and self.least_sign_flip_p is not None:
            note = f"the least that {n} seeds allow" if self.sign_flip_p <= self.least_sign_flip_p else f"{n} seeds"
            parts.append(f"sign-flip {_p(self.sign_flip_p)} ({note})")
        if self.verdict == "not resolved" and self.smallest_effect is not None:
            parts.append(f"{POWER:.0%} of such studies would find {self.smallest_effect:.2g}")
            needed = f"more than {SEEDS_CAP}" if self.seeds_needed is None else f"about {self.seeds_needed}"
            parts.append(f"a study of {needed} seeds would settle a difference of this size")
        if self.left_out:
            parts.append(f"without seed{'s' if len(self.left_out) > 1 else ''} {', '.join(map(str, self.left_out))}")
        return f"{self.verdict}: " + "; ".join(parts)


def _p(value: float) -> str:
    return f"p {value:.3g}" if value >= 0.0001 else "p < 0.0001"


def compare(
    arms: Mapping[str, Mapping[int, float | None]],
    baseline: Mapping[int, float | None],
    *,
    lower_is_better: bool,
    confidence: float = CONFIDENCE,
) -> dict[str, Comparison]:
    """Each arm's place beside the baseline, from the metric of every seed: {arm: {seed: value}} and {seed: value}.

    A seed that is absent, None or not finite on either side is left out as a pair and named in ``left_out``: look
    at it, since an arm that diverges on some seeds is judged here by the others alone. Name every arm of the study,
    those without results too (see ``holm``).
    """
    seeds = sorted(set(baseline).union(*arms.values()))

    def row(values: Mapping[int, float | None]) -> list[float | None]:
        return [values.get(seed) for seed in seeds]

    table = np.array([row(values) for values in arms.values()], float)  # None becomes NaN
    t = paired_t(table.reshape(len(arms), len(seeds)), np.array(row(baseline), float), confidence)
    p_holm = holm(t.p)
    signs = judge(t.mean, p_holm, lower_is_better)
    return {arm: _comparison(seeds, t, i, p_holm, signs, confidence) for i, arm in enumerate(arms)}


def _comparison(seeds: list[int], t: PairedT, i: int, p_holm: Array, signs: Array, confidence: float) -> Comparison:
    """The numbers of arm ``i`` of a study."""
    kept = np.isfinite(t.difference[i])
    difference, n = t.difference[i][kept], int(t.pairs[i])
    reason = None
    if n < 2:
        reason = f"seeds finished on both sides: {n}, and two are needed"
    elif not difference.any():
        reason = "equal to the baseline on every seed (does the change reach the run?)"
    elif np.isnan(t.p[i]):
        reason = "the same difference on every seed (does the seed reach the run?)"
    columns = {"difference": t.mean, "sd": t.sd, "low": t.low, "high": t.high, "p": t.p, "p_holm": p_holm}
    numbers: dict[str, Any] = {k: None if np.isnan(x[i]) else float(x[i]) for k, x in columns.items()}
    share, varies = ALPHA / len(p_holm), reason is None
    return Comparison(
        arms=len(p_holm),
        seeds=tuple(seed for seed, keep in zip(seeds, kept, strict=True) if keep),
        left_out=tuple(seed for seed, keep in zip(seeds, kept, strict=True) if not keep),
        **numbers,
        confidence=confidence,
        verdict=VERDICTS[int(signs[i])],
        reason=reason,
        sign_flip_p=sign_flip_p(difference),
        least_sign_flip_p=2 / 2**n if 2 <= n <= FLIPS_CAP else None,
        smallest_effect=float(smallest_effect(t.sd[i], n, share)) if varies else None,
        seeds_needed=seeds_needed(t.mean[i], t.sd[i], share) if varies else None,
    )
