"""A study's directory as plain rows: what each run measured, its curve, what it cost; and the same as CSV files.

results.csv    a line for each arm and seed: everything that was measured
curves.csv     a line for each validation of each run
verdicts.csv   a line for each arm: its place beside the baseline, and what it spends
answers.csv    of a synthetic task, a line for each arm, seed and difficulty or position
"""

import csv
import dataclasses
import io
import statistics
from collections.abc import Iterable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

import numpy as np

from transformer.analysis.report import middle
from transformer.errors import UserError
from transformer.files import PROVENANCE, STUDY
from transformer.generation.sample import SAMPLES
from transformer.jsons import read_json, read_object, write_whole
from transformer.study.equal import QUANTITIES
from transformer.study.study import RESULT, RESULTS, folder
from transformer.training.metrics import METRICS, read

MEASURED = {
    "bits_per_byte": "bits_per_byte",
    "loss": "eval_loss",
    "perplexity": "perplexity",
    "accuracy": "accuracy",
    "error": "error",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """One arm with one seed. ``points`` is its curve: a row for each validation during the training."""

    arm: str
    seed: int
    result: dict[str, Any] | None
    points: list[dict[str, Any]]
    speed: dict[str, Any] | None  # of a finished run: median tokens per second, seconds in steps, largest memory
    wall: float | None  # seconds from start to end, of a finished run that was never interrupted
    origin: dict[str, Any]
    samples: list[dict[str, Any]]

    @property
    def state(self) -> Literal["finished", "failed", "missing"]:
        if self.result is None:
            return "missing"
        return "failed" if "failed" in self.result else "finished"


def read_study(directory: Path) -> tuple[dict[str, Any], list[Run]]:
    """What results.json and study.json say, and every run, arm after arm. UserError where no run has finished yet."""
    file = directory / RESULTS
    results = read_object(file) if file.is_file() else {"arms": []}
    found = [_run(directory, arm, int(seed)) for arm in results["arms"] for seed in arm["seeds"]]
    if all(run.result is None for run in found):
        raise UserError(f"{directory}: no run of this study has finished yet, so there is nothing to report")
    plan = read_object(directory / STUDY)
    return results | {name: plan.get(name) for name in ("dropped", "budget_hours")}, found


def _run(directory: Path, arm: dict[str, Any], seed: int) -> Run:
    result = arm["seeds"][str(seed)]
    place = directory / "arms" / folder(arm["name"]) / f"seed_{seed}"
    if result and _json(place / RESULT).get("config") != result["config"]:
        place = place.with_name(f"{place.name}.{result['config']}")  # as Runner.place has it
    timing = read(place / "timing.jsonl")
    origin = _json(place / PROVENANCE)
    done = result is not None and "failed" not in result
    return Run(
        arm=arm["name"],
        seed=seed,
        result=result,
        points=_points(read(place / METRICS), timing, arm["quantities"]) if result else [],
        speed=middle(timing) if done else None,
        wall=_wall(origin) if done else None,
        origin=origin,
        samples=_json(place / SAMPLES) or [],
    )


def _points(
    records: list[dict[str, Any]], timing: list[dict[str, Any]], quantities: Mapping[str, float]
) -> list[dict[str, Any]]:
    """Tokens and FLOPs are those of the steps so far; seconds are read off between the steps that were timed."""
    steps, seconds = [1, *(r["step"] for r in timing)], [0.0, *(r["seconds"] for r in timing)]
    return [
        {
            "step": r["step"],
            "tokens": r["step"] * quantities["tokens"] / quantities["steps"],
            "flops": r["step"] * quantities["flops"] / quantities["steps"],
            "seconds": float(np.interp(r["step"], steps, seconds)) if timing else None,
            **{name: r.get(key) for name, key in MEASURED.items()},
        }
        for r in records
        if "eval_loss" in r
    ]


def _wall(origin: Mapping[str, Any]) -> float | None:
    if "end" not in origin or origin.get("earlier"):
        return None
    return (datetime.fromisoformat(origin["end"]) - datetime.fromisoformat(origin["start"])).total_seconds()


def costs(results: Mapping[str, Any], found: Iterable[Run]) -> list[dict[str, Any]]:
    """Of every arm what a run of it takes; None where nothing was measured."""
    found, base = list(found), results["arms"][0]["quantities"]
    rows = []
    for arm in results["arms"]:
        own = [run for run in found if run.arm == arm["name"]]
        speeds = [run.speed for run in own if run.speed]
        walls = [run.wall for run in own if run.wall]
        wall = statistics.median(walls) if walls else None
        rows.append(
            {
                "name": arm["name"],
                **arm["quantities"],
                "tables": arm.get("tables"),
                "more": {name: arm["quantities"][name] / base[name] - 1 for name in QUANTITIES},
                "training_seconds": statistics.median(s["seconds"] for s in speeds) if speeds else None,
                "seconds": wall,
                "runs_per_hour": 3600 / wall if wall else None,
                "tokens_per_second": statistics.median(s["tokens_per_second"] for s in speeds) if speeds else None,
                "memory": max(s["memory"] for s in speeds) if speeds else None,
            }
        )
    return rows


def write_tables(directory: Path, results: Mapping[str, Any], found: Iterable[Run]) -> list[str]:
    """The CSV files; returns their names."""
    found = list(found)
    rates = {arm["name"]: arm["learning_rate"]["chosen"] for arm in results["arms"]}
    tables = {
        "results.csv": [
            {
                "arm": run.arm,
                "seed": run.seed,
                "state": run.state,
                "failed": None,
                "learning_rate": rates[run.arm],
                **{name: x for name, x in (run.result or {}).items() if not isinstance(x, list)},
                **{f"training_{name}": value for name, value in (run.speed or {}).items()},
                "wall_seconds": run.wall,
            }
            for run in found
        ],
        "curves.csv": [{"arm": run.arm, "seed": run.seed, **point} for run in found for point in run.points],
        "verdicts.csv": [_verdict(arm) for arm in results["arms"]],
    }
    if answers := [row for run in found for row in _answers(run)]:
        tables["answers.csv"] = answers
    for name, rows in tables.items():
        out = io.StringIO()
        columns = dict.fromkeys(column for row in rows for column in row)
        writer = csv.DictWriter(out, list(columns), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        write_whole(directory / name, out.getvalue().encode())
    return list(tables)


def _answers(run: Run) -> list[dict[str, Any]]:
    """A line for each difficulty and each position of a task; none where the run is not of one."""
    result = run.result or {}
    if "by_difficulty" not in result:
        return []
    parts = [(result["difficulty"], result["by_difficulty"]), ("position", result["by_position"])]
    return [{"arm": run.arm, "seed": run.seed, "by": name, **row} for name, rows in parts for row in rows]


def _verdict(arm: Mapping[str, Any]) -> dict[str, Any]:
    compared = dict(arm.get("comparison", {}))
    if compared:
        compared["difference_sd"] = compared.pop("sd")
        for name in ("seeds", "left_out"):
            compared[name] = " ".join(map(str, compared[name]))
    own = {"arm": arm["name"], "mean": arm["mean"], "sd": arm["sd"], "learning_rate": arm["learning_rate"]["chosen"]}
    return own | compared | dict(arm["quantities"]) | {"tables": arm.get("tables")}


def _json(path: Path) -> Any:
    """What a file holds; nothing where there is none."""
    return read_json(path) if path.is_file() else {}
