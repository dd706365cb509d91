"""``runs diff``: what differs between two runs, in settings, code and machine, and what came out of each."""

import difflib
import re
from typing import Any

from transformer.checkout import git
from transformer.errors import UserError
from transformer.settings import differing, flat
from transformer.study.registry import DATA, MACHINE, RESULTS, RunFiles, starts
from transformer.tables import columns, shown

COMMIT = re.compile(r"[0-9a-f]{7,64}")
MOST = 60  # lines of a diff in text


def diff(a: RunFiles, b: RunFiles) -> dict[str, Any]:
    """Both values of all that differs, the first run's first. UserError where settings cannot be read."""
    for run in (a, b):
        if not run.settings:
            raise UserError(f"{run.directory}: {run.damage[0] if run.damage else 'its settings are empty'}")
    found: dict[str, Any] = {
        "runs": [str(a.directory), str(b.directory)],
        "damage": [a.damage, b.damage],
        "settings": differing(a.settings, b.settings),
        "code": _code(a, b),
        "data": differing(_part(a, DATA), _part(b, DATA)),
        "machine": differing(_part(a, MACHINE), _part(b, MACHINE)),
    }
    found["same"] = not (found["settings"] or found["code"]["differs"] or found["data"] or found["machine"])
    found["results"] = {name: [a.results[name], b.results[name]] for name in RESULTS}
    return found


def diff_text(result: dict[str, Any]) -> str:
    first, second = map(shown, result["runs"])
    lines = [f"{first}  and  {second}"]
    for run, damage in zip((first, second), result["damage"], strict=True):
        lines += [f"  {run} is damaged: {shown(line)}" for line in damage]
    code = result["code"]
    recorded = all(code["commits"])
    if result["same"]:
        same = "nothing differs: the same settings, code, data and machine"
        lines += ["", same if recorded else "nothing differs of what was recorded; the code's commit was not"]
    for title in ("settings", "data", "machine"):
        if result[title]:
            rows = [(shown(name), *map(shown, values)) for name, values in result[title].items()]
            lines += ["", f"different {title}", *columns(rows, "  ")]
    rows = [("commit", *(shown(commits) if commits else "not recorded" for commits in code["commits"]))]
    rows += [("lines of uncommitted changes", *map(str, code["uncommitted_lines"]))]
    lines += ["", "different code" if code["differs"] else "code", *columns(rows, "  ")]
    lines += [f"  {line.strip()}" for line in (code["stat"] or "").splitlines()]
    if code["uncommitted"]:
        lines += ["  uncommitted changes, what only the first run has (-) and only the second (+):"]
        lines += [f"    {shown(line)}" if line else "" for line in code["uncommitted"][:MOST]]
        more = len(code["uncommitted"]) - MOST
        lines += [f"    and {more} more lines, which --json shows"] if more > 0 else []
    rows = [(name, *map(shown, values)) for name, values in result["results"].items()]
    return "\n".join([*lines, "", "results", *columns([("", first, second), *rows], "  ")])


def _part(run: RunFiles, names: tuple[str, ...]) -> dict[str, Any]:
    return flat({name: run.origin[name] for name in names if name in run.origin})


def _code(a: RunFiles, b: RunFiles) -> dict[str, Any]:
    """Commits (all of a run's starts, in order), and a unified diff of the uncommitted changes of the last start."""
    commits = [_commits(run) for run in (a, b)]
    old, new = (str(run.origin.get("uncommitted") or "").splitlines() for run in (a, b))
    between = [c[-1] for c in commits if c and COMMIT.fullmatch(c[-1])]
    return {
        "differs": commits[0] != commits[1] or old != new,
        "commits": commits,
        "uncommitted_lines": [len(old), len(new)],
        "stat": git("diff", "--stat", *between) if len(set(between)) == 2 else None,
        "uncommitted": list(difflib.unified_diff(old, new, str(a.directory), str(b.directory), lineterm="")),
    }


def _commits(run: RunFiles) -> list[str]:
    """Those that the run was trained with, in order; empty where none was recorded."""
    found = [str(start["commit"]) for start in starts(run.origin) if start.get("commit")]
    return list(dict.fromkeys(found))
