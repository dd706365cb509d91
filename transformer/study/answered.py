"""A synthetic task in a study's report: each arm's error by difficulty, for a table and for `figures.answers`."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from transformer.study.directory import Run

SOLVED = 0.05  # a difficulty is solved where no more than this share of the answers is wrong


def answered(results: Mapping[str, Any], runs: Sequence[Run]) -> dict[str, Any] | None:
    """The errors of every arm, by difficulty and seed; None where the study is not of a task.

    ``solved`` of an arm is the highest difficulty up to which its mean error is at most SOLVED everywhere; None where
    it solves not even the least.
    """
    found = [run for run in runs if run.result and "by_difficulty" in run.result]
    if not found:
        return None
    first = found[0].result or {}
    values = sorted({row["value"] for run in found for row in (run.result or {})["by_difficulty"]})
    arms = []
    for arm in results["arms"]:
        errors: dict[int, list[float]] = {value: [] for value in values}
        for run in found:
            if run.arm == arm["name"]:
                for row in (run.result or {})["by_difficulty"]:
                    errors[row["value"]].append(row["error"])
        means = [statistics.fmean(errors[value]) if errors[value] else None for value in values]
        done = next((i for i, mean in enumerate(means) if mean is None or mean > SOLVED), len(values))
        spans = [(min(own), max(own)) if own else None for own in errors.values()]
        solved = values[done - 1] if done else None
        arms.append({"name": arm["name"], "errors": means, "spans": spans, "solved": solved})
    name, chance = first["difficulty"], first["chance_error"]
    return {"difficulty": name, "values": values, "arms": arms, "chance": chance, "bar": SOLVED}
