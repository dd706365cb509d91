"""Is the order of a study's arms the same all through the training, or only at its end?

Every run is measured equally often whatever its number of steps (but for one more at its last step, where that falls
just behind another), so the k-th measurements of all arms are at the same share of their trainings: arms are ordered by
their means over the seeds there, beside the order at the end.
"""

import itertools
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from transformer.study.directory import Run


def ranking(results: Mapping[str, Any], runs: Sequence[Run]) -> list[dict[str, Any]] | None:
    """The order at each measurement; None where fewer than three arms have curves, or those are not of one length.

    ``share``: of the training; ``order``: names, the best first; ``same``: the share of pairs that stand as at the end.
    """
    curves: dict[str, list[float]] = {}
    shares: dict[str, list[float]] = {}
    for arm in results["arms"]:
        own = [run for run in runs if run.arm == arm["name"] and run.state == "finished"]
        points = [_regular(run.points) for run in own]
        values = [[point[results["metric"]] for point in each] for each in points]
        if values and values[0] and all(None not in v and len(v) == len(values[0]) for v in values):
            curves[arm["name"]] = [statistics.fmean(at) for at in zip(*values, strict=True)]
            shares[arm["name"]] = [point["step"] / points[0][-1]["step"] for point in points[0]]
    count = min(map(len, curves.values()), default=0)
    if len(curves) < 3 or count < 2 or any(len(curve) != count for curve in curves.values()):
        return None
    sign = 1 if results["better"] == "less" else -1
    orders = [sorted(curves, key=lambda name: sign * curves[name][k]) for k in range(count)]
    place = {name: i for i, name in enumerate(orders[-1])}
    pairs = len(place) * (len(place) - 1) / 2
    return [
        {
            "share": statistics.fmean(own[k] for own in shares.values()),
            "order": order,
            "same": sum(place[a] < place[b] for a, b in itertools.combinations(order, 2)) / pairs,
        }
        for k, order in enumerate(orders)
    ]


def _regular(points: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """Without the last but one, where the last comes sooner than half an interval after it."""
    steps = [point["step"] for point in points]
    extra = len(steps) > 2 and 2 * (steps[-1] - steps[-2]) < steps[1] - steps[0]
    return [*points[:-2], points[-1]] if extra else points


def in_words(found: Sequence[Mapping[str, Any]]) -> str:
    """From when on the best arm and the whole order are those of the end."""

    def since(same: list[bool]) -> str:
        first = next(i for i in range(len(same)) if all(same[i:]))
        return f"{found[first]['share']:.0%}"

    last = found[-1]["order"]
    best, whole = since([row["order"][0] == last[0] for row in found]), since([row["order"] == last for row in found])
    return f"{last[0]} is first from {best} of the training on, and the whole order is that of the end from {whole} on."
