"""A power law through a study's points: metric = floor + scale * size^-exponent, with intervals, or a refusal.

The form is that of arXiv:2203.15556, section 3.3, in one size. For a given exponent the rest is linear, so the best
exponent is searched for and the rest solved (Golub and Pereyra 1973): no starting point, no local minimum missed.
Intervals are a bootstrap's: residuals are drawn anew and the law is fitted again (Efron 1979). What is checked is
that the law foretells: fitted without the largest size, its interval there must hold the value that was measured.
What is not done is to foretell from too little: fewer than SIZES sizes, a span below SPAN, a law that failed at the
size held out, or a size beyond REACH times the largest one are refused.

The residuals are taken as independent and alike at all sizes. Noise that a seed brings to all sizes makes the
intervals too narrow for another seed's.
P points (one for each size and seed), S samples, E exponents that are tried.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from transformer.errors import UserError

Array = npt.NDArray[np.float64]
SIZES, SPAN, REACH = 5, 4.0, 4.0
SEEDS = 2  # the least points at each size: with one there is nothing to tell noise from misfit by
CONFIDENCE = 0.95
SAMPLES = 1000
LEAST, MOST = 0.02, 8.0  # exponents that are looked for
TRIED, ROUNDS = 48, 4


class Law(NamedTuple):
    """One law, or many: each [S]."""

    floor: Array
    scale: Array
    exponent: Array

    def at(self, size: npt.ArrayLike) -> Array:
        """The metric at sizes [...], [S, ...]."""
        size = np.asarray(size, float)
        part = (slice(None),) + (None,) * size.ndim
        found: Array = self.floor[part] + self.scale[part] * size ** -self.exponent[part]
        return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fit:
    """A law with intervals. ``held_out`` says how it foretold the largest size from the others."""

    floor: float
    scale: float
    exponent: float
    intervals: dict[str, tuple[float, float]]
    confidence: float
    sizes: tuple[float, ...]
    held_out: dict[str, Any]  # size, measured, foretold, low, high, inside
    samples: Law

    def foretell(self, size: float) -> tuple[float, float, float]:
        """The metric at ``size`` and the law's interval, without a run's noise. UserError where that is refused."""
        if not self.held_out["inside"]:
            raise UserError(
                f"fit: not extrapolated: the law of the smaller sizes missed {self.held_out['size']:g}; it foretold "
                f"{self.held_out['foretold']:.4g} and {self.held_out['measured']:.4g} was measured"
            )
        if not self.sizes[0] <= size <= REACH * self.sizes[-1]:
            raise UserError(
                f"fit: {size:g} is outside {self.sizes[0]:g} to {REACH:g} times {self.sizes[-1]:g}, which is as far as "
                "these points can tell; measure nearer to it"
            )
        value = self.floor + self.scale * size**-self.exponent
        low, high = _between(self.samples.at(size), self.confidence)
        return value, low, high

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        names = ("floor", "scale", "exponent", "intervals", "confidence", "held_out")
        return {name: getattr(self, name) for name in names} | {"sizes": list(self.sizes)}

    def in_words(self, metric: str, field: str) -> str:
        """Two lines for people."""
        said = [f"{n} {getattr(self, n):.4g} ({low:.4g} to {high:.4g})" for n, (low, high) in self.intervals.items()]
        held = self.held_out
        check = (
            f"without {field}={held['size']:g} the law foretells {held['foretold']:.4g} "
            f"({held['low']:.4g} to {held['high']:.4g}) there; {held['measured']:.4g} was measured: "
            f"{'inside' if held['inside'] else 'OUTSIDE, so the law is not to be extrapolated'}"
        )
        return (
            f"{metric} = floor + scale * {field}^-exponent, {self.confidence:.0%} intervals: {', '.join(said)}\n{check}"
        )


def fit(points: Mapping[float, Sequence[float]], samples: int = SAMPLES, confidence: float = CONFIDENCE) -> Fit:
    """The law of a metric, of which less is better: size -> its value for each seed.

    UserError, saying what is missing, where these points cannot carry a law.
    """
    sizes = sorted(points)
    if any(size <= 0 for size in sizes):
        raise UserError(f"fit: sizes must be above 0, and {sizes[0]:g} is one of them")
    if len(sizes) < SIZES:
        raise UserError(f"fit: {len(sizes)} sizes are too few for three numbers and a check; measure {SIZES} or more")
    if sizes[-1] / sizes[0] < SPAN:
        raise UserError(
            f"fit: sizes from {sizes[0]:g} to {sizes[-1]:g} span a factor of {sizes[-1] / sizes[0]:.2g}; "
            f"a law needs {SPAN:g} or more"
        )
    few = [size for size in sizes if len(points[size]) < SEEDS]
    if few:
        raise UserError(
            f"fit: {few[0]:g} has {len(points[few[0]])} finite values, and {SEEDS} seeds or more are needed"
        )
    whole, spread = _resampled(points, sizes, samples)
    if whole.scale[0] == 0:
        raise UserError("fit: the metric does not fall as the size grows, so no power law is there")
    rest, rest_spread = _resampled(points, sizes[:-1], samples, seed=1)
    last, measured = sizes[-1], float(np.mean(points[sizes[-1]]))
    # What was measured there has noise of its own, that of a mean over the seeds.
    noise_S = _noise(points, sizes[:-1], rest, samples, len(points[last]))
    low, high = _between(rest_spread.at(last) + noise_S, confidence)
    held_out = {"size": last, "measured": measured, "foretold": float(rest.at(last)[0]), "low": low, "high": high}
    return Fit(
        floor=float(whole.floor[0]),
        scale=float(whole.scale[0]),
        exponent=float(whole.exponent[0]),
        intervals={n: _between(x_S, confidence) for n, x_S in zip(Law._fields, spread, strict=True)},
        confidence=confidence,
        sizes=tuple(sizes),
        held_out=held_out | {"inside": bool(low <= measured <= high)},
        samples=spread,
    )


def _resampled(
    points: Mapping[float, Sequence[float]], sizes: Sequence[float], samples: int, seed: int = 0
) -> tuple[Law, Law]:
    """The law of these sizes, and those of the bootstrap."""
    x_P, y_P = _flat(points, sizes)
    law = solve(x_P, y_P[None])
    residual_P = _residuals(x_P, y_P, law)
    drawn_SP = np.random.default_rng(seed).choice(residual_P, (samples, x_P.size))
    return law, solve(x_P, law.at(x_P) + drawn_SP)


def _flat(points: Mapping[float, Sequence[float]], sizes: Sequence[float]) -> tuple[Array, Array]:
    x_P = np.array([size for size in sizes for _ in points[size]], float)
    return x_P, np.array([y for size in sizes for y in points[size]], float)


def _residuals(x_P: Array, y_P: Array, law: Law) -> Array:
    """Centred, and as wide as the noise: a fit of three numbers leaves them narrower."""
    residual_P = y_P - law.at(x_P)[0]
    found: Array = (residual_P - residual_P.mean()) * np.sqrt(x_P.size / max(x_P.size - 3, 1))
    return found


def _noise(
    points: Mapping[float, Sequence[float]], sizes: Sequence[float], law: Law, samples: int, seeds: int
) -> Array:
    residual_P = _residuals(*_flat(points, sizes), law)
    found: Array = np.random.default_rng(2).choice(residual_P, (samples, seeds)).mean(-1)
    return found


def _between(values: Array, confidence: float) -> tuple[float, float]:
    low, high = np.quantile(values, [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)


def solve(x_P: Array, y_SP: Array) -> Law:
    """The law with the least squares for each row of ``y``, floor and scale not below 0."""
    middle = np.exp(np.log(x_P).mean())
    scaled_P, S = x_P / middle, len(y_SP)
    low_S, high_S = np.full(S, np.log(LEAST)), np.full(S, np.log(MOST))
    for _ in range(ROUNDS):  # each round looks between the neighbours of the last one's best
        exponent_SE = np.exp(np.linspace(low_S, high_S, TRIED, axis=-1))
        floor_SE, scale_SE, error_SE = _linear(scaled_P, y_SP, exponent_SE)
        best_S = error_SE.argmin(-1)
        step_S = (high_S - low_S) / (TRIED - 1)
        centre_S = low_S + best_S * step_S
        low_S, high_S = np.maximum(centre_S - step_S, np.log(LEAST)), np.minimum(centre_S + step_S, np.log(MOST))
    pick = (np.arange(S), best_S)
    exponent_S = exponent_SE[pick]
    return Law(floor_SE[pick], scale_SE[pick] * middle**exponent_S, exponent_S)


def _linear(x_P: Array, y_SP: Array, exponent_SE: Array) -> tuple[Array, Array, Array]:
    """Floor, scale and squared error of each exponent, [S, E]."""
    power_SEP = x_P ** -exponent_SE[..., None]
    mean_SE, y_S1 = power_SEP.mean(-1), y_SP.mean(-1)[:, None]
    with_y_SE = np.einsum("SEP,SP->SE", power_SEP, y_SP) / x_P.size
    square_SE = (power_SEP**2).mean(-1)
    scale_SE = np.maximum((with_y_SE - mean_SE * y_S1) / np.maximum(square_SE - mean_SE**2, 1e-300), 0)
    floor_SE = y_S1 - scale_SE * mean_SE
    below = floor_SE < 0
    scale_SE = np.where(below, np.maximum(with_y_SE / square_SE, 0), scale_SE)
    floor_SE = np.where(below, 0, floor_SE)
    error_SE = ((floor_SE[..., None] + scale_SE[..., None] * power_SEP - y_SP[:, None]) ** 2).sum(-1)
    return floor_SE, scale_SE, error_SE


# What a study may be a grid over, and how a law calls it. A run's tokens grow with its steps.
FIELDS = {
    "model.depth": "depth",
    "model.width": "width",
    "tokenizer.vocab_size": "vocabulary",
    "train.steps": "tokens",
    "train.batch": "tokens",
}


def of_study(results: Mapping[str, Any]) -> dict[str, Any] | None:
    """The law of a study that is a grid over one of FIELDS; None of another study, or of a metric where more is better.

    The result has ``name``, ``points`` and either ``fit`` or ``refused``, which says why there is none.
    """
    fields = {field for arm in results["arms"] for field in arm["changes"]}
    if len(fields) != 1 or not fields <= FIELDS.keys() or results["better"] != "less":
        return None
    (field,) = fields
    if any(field not in arm.get("grid", ()) for arm in results["arms"]):
        return None  # arms with names of their own, or a study of before there were laws
    name, points = FIELDS[field], dict[float, list[float]]()
    for arm in results["arms"]:
        size = arm["quantities"]["tokens"] if name == "tokens" else arm["grid"][field]
        values = [row and row.get(results["metric"]) for row in arm["seeds"].values()]
        points.setdefault(float(size), []).extend(value for value in values if value is not None)
    found: dict[str, Any] = {"name": name, "points": points}
    try:
        return found | {"fit": fit(points)}
    except UserError as error:
        return found | {"refused": str(error).removeprefix("fit: ")}
