"""``runs list`` and ``runs show``: what the runs on disk are, as JSON and as text."""

import contextlib
import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformer.files import CHECKPOINTS
from transformer.settings import as_number
from transformer.study.registry import DATA, MACHINE, STOPPED, RunFiles, starts
from transformer.study.selection import varying
from transformer.tables import columns, human, shown
from transformer.training.metrics import best_step

HEAD = ("run", "step", "bits/byte", "best", "tokens", "seconds", "state", "start (UTC)", "settings that differ")
WIDEST, MOST = 24, 10  # characters of one setting's value in a list, and settings; --json has all


def listing(root: Path, runs: Sequence[RunFiles], known: int) -> dict[str, Any]:
    """The chosen ``runs`` of ``known`` that are below ``root``, with the settings that differ among the chosen."""
    short = varying(runs)
    entries = [
        {
            "run": str(run.directory),
            **run.results,
            "steps": run.steps,
            "damage": run.damage,
            "differs": {label: run.settings[name] for name, label in short.items() if name in run.settings},
            "settings": run.settings,
        }
        for run in runs
    ]
    return {"root": str(root), "known": known, "runs": entries}


def list_text(result: dict[str, Any]) -> str:
    """One line for each run."""
    runs, where = result["runs"], shown(result["root"])
    if not runs:
        return f"none of the {result['known']} runs in {where} matches" if result["known"] else f"no runs in {where}"
    rows = [
        [
            shown(run["run"]),
            f"{run['step']}/{shown(run['steps'])}",
            _measured(run, "bits_per_byte", "error"),
            _measured(run, "best_bits_per_byte", "best_error"),
            _decimals(run["tokens"], 0),
            _decimals(run["seconds"], 0),
            state(run),
            shown(run["start"])[:16].replace("T", " "),
            _differs(run),
        ]
        for run in runs
    ]
    return "\n".join(columns([HEAD, *rows]))


def show(run: RunFiles) -> dict[str, Any]:
    """Everything about one run."""
    return {
        "run": str(run.directory),
        "steps": run.steps,
        "damage": run.damage,
        "results": run.results,
        "settings": run.settings,
        "provenance": run.origin,
        "checkpoints": _checkpoints(run),
        "files": {p.name + "/" * os.path.isdir(p): _size(p) for p in _entries(run.directory)},
    }


def show_text(result: dict[str, Any]) -> str:
    head = f"{shown(result['run'])}: {state(result | result['results'])}"
    lines = [head, *(f"  damaged: {shown(line)}" for line in result["damage"])]
    tables: dict[str, list[tuple[str, ...]]] = {
        "settings": [(shown(name), shown(value)) for name, value in result["settings"].items()],
        "where it comes from": _origin(result["provenance"]),
        "results": [(name, shown(value)) for name, value in result["results"].items()],
        "checkpoints": [(shown(c["name"]), human(c["bytes"]), c["note"]) for c in result["checkpoints"]],
        "files": [(shown(name), human(size)) for name, size in result["files"].items()],
    }
    for title, rows in tables.items():
        lines += ["", title, *(columns(rows, "  ") if rows else ["  none"])]
    return "\n".join(lines)


def state(run: dict[str, Any]) -> str:
    """A run's state with the step that it was left at."""
    return f"{run['state']} at step {run['step']}" if run["state"] == STOPPED else run["state"]


def _origin(origin: dict[str, Any]) -> list[tuple[str, ...]]:
    """Provenance as rows; of the uncommitted changes the size, the whole of them is in --json."""
    rows = []
    command, changes, versions = origin.get("command"), origin.get("uncommitted"), origin.get("versions")
    if isinstance(command, list):
        rows.append(("command", f"python -m transformer {shlex.join(map(str, command))}"))
    for name in ("commit", *MACHINE, *DATA):
        if name == "versions" and isinstance(versions, dict):
            rows.append((name, ", ".join(f"{library} {version}" for library, version in versions.items())))
        elif name in origin:
            rows.append((name, shown(origin[name])))
        if name == "commit" and changes:
            rows.append(("uncommitted", f"{len(str(changes).splitlines())} lines of changes (--json shows them)"))
    for number, start in enumerate(starts(origin)):
        told = {"after step": "resumed_at_step", "until": "end", "on": "host", "commit": "commit"}
        words = [f"{word} {start[name]}" for word, name in told.items() if name in start]
        rows.append(("resumed" if number else "started", ", ".join([str(start.get("start")), *words])))
    return [(name, shown(value)) for name, value in rows]


def _checkpoints(run: RunFiles) -> list[dict[str, Any]]:
    """What there is of checkpoints. Their content is checked by those who use it, not here."""
    best = best_step([{"step": r["step"], "eval_loss": as_number(r.get("eval_loss"))} for r in run.records])
    roles = {str(max(run.saved, default=None)): ["newest"]}
    roles.setdefault(str(best), []).append("best")
    finished = {str(step): ", ".join(roles.get(str(step), ["finished"])) for step in run.saved}
    return [
        {"name": path.name, "bytes": _size(path), "note": finished.get(path.name, "not a finished checkpoint")}
        for path in sorted(_entries(run.directory / CHECKPOINTS), key=lambda p: (len(p.name), p.name))
    ]


def _entries(directory: Path) -> list[Path]:
    try:
        return sorted(directory.iterdir())
    except OSError:  # none, or none that can be read
        return []


def _size(path: Path) -> int:
    """Bytes of a file, or of all files below a directory."""
    total = 0
    for file in [os.path.join(folder, name) for folder, _, names in os.walk(path) for name in names] or [str(path)]:
        with contextlib.suppress(OSError):  # it has just been removed
            total += os.lstat(file).st_size
    return total


def _differs(run: dict[str, Any]) -> str:
    """What is wrong with the run, then the first of the settings that differ."""
    words = [f"{shown(name)}={_short(value)}" for name, value in run["differs"].items()]
    more = [f"and {len(words) - MOST} more"] if len(words) > MOST else []
    return " ".join([*map(shown, run["damage"]), *words[:MOST], *more])


def _measured(run: dict[str, Any], of_text: str, of_task: str) -> str:
    """Bits per byte; of a synthetic task, which has none, its error."""
    return _decimals(run[of_text], 4) if run[of_task] is None else f"error {run[of_task]:.4f}"


def _decimals(value: float | None, places: int) -> str:
    return "-" if value is None else f"{value:,.{places}f}"


def _short(value: Any) -> str:
    text = shown(value)
    return text if len(text) <= WIDEST else text[: WIDEST - 1] + "…"
