"""Choosing among runs by their settings and results: ``model.depth=4``, ``bits_per_byte<2.5``, an order."""

import operator
import re
from collections.abc import Sequence
from typing import Any

from transformer.errors import UserError, did_you_mean
from transformer.settings import parse
from transformer.study.registry import RESULTS, RunFiles

TEST = re.compile(r"\s*([\w.]+)\s*(>=|<=|!=|==?|>|<)\s*(.*?)\s*")
COMPARE = {
    ">=": operator.ge,
    "<=": operator.le,
    "!=": operator.ne,
    "=": operator.eq,
    "==": operator.eq,
    ">": operator.gt,
    "<": operator.lt,
}
ABSENT = object()


def select(runs: Sequence[RunFiles], tests: Sequence[str]) -> list[RunFiles]:
    """The runs that pass all ``tests``; one that lacks the setting or result that a test names does not.

    UserError for a test that cannot be read, an unknown name, or a value that is not of the setting's type.
    """
    chosen = list(runs)
    for test in tests:
        match = TEST.fullmatch(test)
        if match is None:
            raise UserError(f"--where: {test!r} is not NAME=VALUE (or with !=, >, <, >=, <=), such as 'model.depth=4'")
        name, compare, text = match.groups()
        check_name(runs, name, "--where")
        chosen = [run for run in chosen if _passes(value_of(run, name), compare, text, f"--where: {name}")]
    return chosen


def in_order(runs: Sequence[RunFiles], name: str) -> list[RunFiles]:
    """By a setting or result, smallest first, numbers before text; runs without it come last. UserError as above."""
    check_name(runs, name, "--sort")

    def key(run: RunFiles) -> tuple[int, float, str]:
        value = value_of(run, name)
        if value is ABSENT or value is None:
            return 2, 0, ""
        return (0, value, "") if isinstance(value, int | float) else (1, 0, str(value))

    return sorted(runs, key=key)


def varying(runs: Sequence[RunFiles]) -> dict[str, str]:
    """The settings that have several values among these runs, each with the shortest name that is clear among them.

    Where a run lacks a setting that counts as no value: it may be older than the setting, or of another kind.
    """
    values: dict[str, set[str]] = {}
    for run in runs:
        for name, value in run.settings.items():
            values.setdefault(name, set()).add(repr(value))
    names = {name: name.removesuffix(".kind").split(".") for name, found in values.items() if len(found) > 1}
    short = {}
    for name, parts in names.items():
        endings = (parts[-n:] for n in range(1, len(parts) + 1))
        clear = (e for e in endings if sum(p[-len(e) :] == e for p in names.values()) == 1)
        short[name] = ".".join(next(clear, [name]))  # none is clear where only a damaged run has the name
    return short


def value_of(run: RunFiles, name: str) -> Any:
    """A result or a setting of the run; ABSENT where it has none. A tagged setting's tag goes by its own name too."""
    if name in RESULTS:
        return ABSENT if run.results[name] is None else run.results[name]
    return next((run.settings[known] for known in (name, f"{name}.kind") if known in run.settings), ABSENT)


def check_name(runs: Sequence[RunFiles], name: str, flag: str) -> None:
    """UserError where no run has such a setting and no result is called so."""
    settings = {known for run in runs for known in run.settings}
    choices = {known.removesuffix(".kind") for known in settings} | set(RESULTS)
    if runs and name not in settings | choices:
        raise UserError(f"{flag}: {name!r} is no setting of these runs and no result{did_you_mean(name, choices)}")


def _passes(value: Any, compare: str, text: str, where: str) -> bool:
    if value is ABSENT:
        return False
    if isinstance(value, list):
        value = ",".join(map(str, value))
    # Where it is no text, "none" is a thing to ask for: what is none in one run may be a number in the next.
    kinds: dict[type, Any] = {bool: bool | None, int: float | None, float: float | None, str: str}
    wanted = parse(text, kinds.get(type(value), str | None), where)
    try:
        return bool(COMPARE[compare](value, wanted))
    except TypeError:  # neither smaller nor larger: none and a number
        return False
