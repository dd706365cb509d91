"""Power laws: planted ones are found, their intervals cover, and what cannot carry a law is refused."""

import json
from typing import Any

import numpy as np
import pytest
from scipy.optimize import curve_fit

from transformer.errors import UserError
from transformer.study import fits
from transformer.study.fits import Fit, Law, fit, of_study, solve

DEPTHS = (2, 4, 8, 16, 32, 64)


def planted(
    seed: int = 0, noise: float = 0.005, law: tuple[float, float, float] = (1.5, 2.0, 0.5), seeds: int = 5, sizes=DEPTHS
) -> dict[float, list[float]]:
    draws = np.random.default_rng(seed).normal(0, noise, (len(sizes), seeds))
    floor, scale, exponent = law
    return {x: (floor + scale * x**-exponent + row).tolist() for x, row in zip(sizes, draws, strict=True)}


@pytest.mark.parametrize("law", [(1.5, 2.0, 0.5), (0.0, 3.0, 0.1), (0.7, 40.0, 1.3), (2.0, 1e4, 2.0)], ids=str)
def test_a_law_without_noise_is_found(law: tuple[float, float, float]) -> None:
    for unit in (1.0, 1e6):  # of the sizes
        floor, scale, exponent = law
        x = np.array(DEPTHS) * unit
        found = solve(x, (floor + scale * (x / unit) ** -exponent)[None])
        assert found.exponent[0] == pytest.approx(exponent, rel=2e-3)
        assert found.floor[0] == pytest.approx(floor, abs=0.02)
        assert found.at(x)[0] == pytest.approx(floor + scale * (x / unit) ** -exponent, rel=1e-3)


def test_neither_floor_nor_scale_is_below_zero() -> None:
    x = np.array(DEPTHS, float)
    falling, rising = 3 * x**-0.5 - 0.3, 1 + x / 100
    found = solve(x, np.stack([falling, rising]))
    assert found.floor[0] == 0 and found.scale[0] > 0
    assert found.scale[1] == 0 and found.floor[1] == pytest.approx(rising.mean())


def test_the_squares_are_no_larger_than_another_solvers() -> None:
    for seed in range(20):
        points = planted(seed, noise=0.02)
        x = np.repeat(DEPTHS, 5).astype(float)
        y = np.concatenate([points[size] for size in DEPTHS])
        found = solve(x, y[None])
        bounds: Any = ([0, 0, fits.LEAST], [np.inf, np.inf, fits.MOST])
        best, _ = curve_fit(lambda x, c, a, b: c + a * x**-b, x, y, p0=(1, 2, 0.5), bounds=bounds)
        theirs = ((best[0] + best[1] * x ** -best[2] - y) ** 2).sum()
        assert ((found.at(x)[0] - y) ** 2).sum() <= theirs * (1 + 1e-4)


def test_many_laws_at_once_are_those_of_one_at_a_time() -> None:
    x = np.array(DEPTHS, float)
    y = np.stack([1 + a * x**-b for a, b in ((1, 0.3), (2, 1.0), (3, 2.0))]) + 0.01 * np.sin(np.arange(6))
    many = solve(x, y)
    for i in range(3):
        assert all(a[i] == b[0] for a, b in zip(many, solve(x, y[i : i + 1]), strict=True))


COVERAGE = [
    pytest.param(0.02, 120, id="some noise"),
    pytest.param(0.003, 400, id="little noise", marks=pytest.mark.exhaustive),
]


@pytest.mark.parametrize(("noise", "studies"), COVERAGE)
def test_intervals_cover_what_was_planted(noise: float, studies: int) -> None:
    """95 % in name. Of 120 planted studies the share that covers has a standard error of 2 %."""
    inside = {"floor": 0, "scale": 0, "exponent": 0, "held": 0, "foretold": 0}
    law = {"floor": 1.5, "scale": 2.0, "exponent": 0.5}
    for seed in range(studies):
        found = fit(planted(seed, noise), samples=100)
        for name, value in law.items():
            low, high = found.intervals[name]
            inside[name] += low <= value <= high
        inside["held"] += found.held_out["inside"]
        if found.held_out["inside"]:
            _, low, high = found.foretell(128)
            inside["foretold"] += low <= 1.5 + 2 * 128**-0.5 <= high
    shares = {name: count / studies for name, count in inside.items()}
    print(shares)
    assert all(0.86 <= shares[name] <= 0.995 for name in (*law, "held")), shares
    assert inside["foretold"] / inside["held"] > 0.86, shares


def test_a_bend_is_met_at_the_size_held_out() -> None:
    """A law up to 32 blocks, and no gain behind: the check must fail, and the law must not be extrapolated."""
    points = planted()
    points[64] = [value + 0.1 for value in points[32]]
    found = fit(points)
    rest = np.repeat(DEPTHS[:-1], 5).astype(float)
    alone = solve(rest, np.concatenate([points[size] for size in DEPTHS[:-1]])[None])
    assert found.held_out["foretold"] == pytest.approx(alone.at(64)[0])
    assert not found.held_out["inside"] and "OUTSIDE" in found.in_words("loss", "depth")
    with pytest.raises(UserError, match="missed 64"):
        found.foretell(100)


REFUSED: dict[str, tuple[dict[float, list[float]], str]] = {
    "four sizes": (planted(sizes=(1, 4, 16, 64)), "4 sizes are too few"),
    "none": ({}, "0 sizes are too few"),
    "a narrow span": (planted(sizes=(10, 12, 14, 16, 18)), "span a factor of 1.8"),
    "one seed": (planted(seeds=1), "1 finite values"),
    "a size of zero": (planted(sizes=(2, 4, 8, 16, 32)) | {0.0: [1.0, 2.0]}, "above 0"),
    "a metric that grows": ({x: [1 + x / 10, 1.01 + x / 10] for x in (1.0, 2.0, 4.0, 8.0, 16.0)}, "does not fall"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_carry_a_law_is_refused(name: str) -> None:
    points, why = REFUSED[name]
    with pytest.raises(UserError, match=why):
        fit(points)


def test_sizes_beyond_reach_are_not_foretold() -> None:
    found = fit(planted())
    assert found.foretell(256)[1] < 1.5 + 2 * 256**-0.5 < found.foretell(256)[2]
    for size in (257, 1.9):
        with pytest.raises(UserError, match="outside"):
            found.foretell(size)
    json.dumps(found.as_dict())


def study(field: str, metric: str = "loss", sizes: tuple[int, ...] = DEPTHS) -> dict[str, Any]:
    points = planted(sizes=sizes)
    arms = [
        {
            "name": str(size),
            "changes": {field: size} if i else {},
            "grid": {field: size},
            "quantities": {"tokens": 1000 * size},
            "seeds": {str(seed): {metric: value} for seed, value in enumerate(points[size])},
        }
        for i, size in enumerate(sizes)
    ]
    return {"arms": arms, "metric": metric, "better": "more" if metric == "accuracy" else "less"}


def test_a_study_over_sizes_has_a_law_or_says_why_not() -> None:
    found = of_study(study("model.depth"))
    assert found and isinstance(found["fit"], Fit) and found["name"] == "depth"
    tokens = of_study(study("train.steps"))
    assert tokens and tokens["fit"].sizes[0] == 2000
    refused = of_study(study("model.depth", sizes=(1, 2, 4)))
    assert refused and "3 sizes are too few" in refused["refused"]
    failed = study("model.depth")
    failed["arms"][0]["seeds"] = {"0": None, "1": {"loss": None, "failed": "x"}}
    assert "0 finite" in (of_study(failed) or {})["refused"]
    assert of_study(study("model.depth", "accuracy")) is None
    assert of_study(study("model.heads")) is None
    named = study("model.depth")
    named["arms"][0]["grid"] = {}
    assert of_study(named) is None
    two = study("model.depth")
    two["arms"][1]["changes"]["model.width"] = 3
    assert of_study(two) is None


def test_a_law_has_a_value_for_each_sample_and_size() -> None:
    law = Law(np.array([1.0, 2.0]), np.array([1.0, 1.0]), np.array([1.0, 2.0]))
    np.testing.assert_allclose(law.at([1, 2]), [[2, 1.5], [3, 2.25]])
    np.testing.assert_allclose(law.at(2.0), [1.5, 2.25])
