"""What is the launcher's on a command line, what is the job's, and what follows from the job's."""

import ast
import difflib
import hashlib
import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from launch.errors import UserError
from launch.job import Job

COMMON: dict[str, tuple[str | None, str]] = {
    "name": ("", "the job's name (default: the config file's and a hash of the job's arguments)"),
    "command": ("", "what of python -m transformer is run (default: study where the config file has get_study)"),
    "each_arm": ("false", "each arm of the study as a job of its own, all at once; then one more, which compares them"),
    "dry_run": ("false", "print exactly what would be run, and do nothing; with --json as one JSON object"),
}
"""The flags of every place; as a place's OPTIONS."""


def split(argv: Sequence[str], known: Mapping[str, tuple[str | None, str]]) -> tuple[dict[str, str], list[str]]:
    """The values of the ``known`` flags, defaults filled in, and all other words as they are."""
    values: dict[str, str] = {}
    rest: list[str] = []
    for word in argv:
        name, equals, value = word.removeprefix("--").partition("=")
        if not word.startswith("--") or name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.85) if word.startswith("--") else []
            if near:  # the job would refuse it, on machines that have been paid for by then
                raise UserError(f"--{name}: is no flag of the launcher, and nearly --{near[0]}; is that meant?")
            rest.append(word)
            continue
        alone = known[name][0] == "false"
        if name in values:
            raise UserError(f"--{name}: is given twice")
        if not equals and not alone:
            raise UserError(f"--{name}: has no value, write --{name}=VALUE")
        if equals and alone and value not in ("true", "false"):
            raise UserError(f"--{name}: {value!r} is neither true nor false")
        values[name] = value if equals else "true"
    for name, (default, about) in known.items():
        if default is None and name not in values:
            raise UserError(f"--{name} is missing: {about}")
        values.setdefault(name, default or "")
    return values, rest


def value_of(flag: str, words: Sequence[str]) -> str | None:
    """The value that --flag=VALUE or --flag VALUE has among the job's ``words``; the last counts."""
    found = None
    for word, following in zip(words, [*words[1:], None], strict=False):
        if word.startswith(f"--{flag}="):
            found = word.partition("=")[2]
        elif word == f"--{flag}":
            found = following
    return found


def make_job(words: Sequence[str], name: str = "", command: str = "") -> Job:
    """The job of the ``words`` that follow `python -m transformer COMMAND`."""
    config = value_of("config", words)
    command = command or ("study" if config and _has_study(Path(config)) else "train")
    if not re.fullmatch(r"[a-z_]+", command):
        raise UserError(f"--command: {command!r} is not the name of a command")
    arguments = (command, *words)
    return Job(name=name or _name(config or command, arguments), arguments=arguments)


def _has_study(path: Path) -> bool:
    """Whether the Python file defines get_study. It is read, not run: running it imports JAX."""
    try:
        body = ast.parse(path.read_bytes()).body
    except (OSError, SyntaxError, ValueError):
        return False  # the command itself says what is wrong with the file
    names: set[str | None] = set()
    for node in body:
        if isinstance(node, ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Assign):
            names |= {getattr(target, "id", None) for target in node.targets}
    return "get_study" in names


def _name(config: str, arguments: Sequence[str]) -> str:
    """The same for the same arguments, so that a second launch finds the first."""
    told_apart = hashlib.sha256(b"\0".join(map(os.fsencode, arguments))).hexdigest()[:6]
    stem = re.sub("[^a-z0-9]+", "-", Path(config).stem.lower()).strip("-")
    if not stem[:1].isalpha():
        stem = f"job-{stem}".strip("-")
    return f"{stem[:33].rstrip('-')}-{told_apart}"


def whole(options: Mapping[str, str], name: str, least: int = 1) -> int:
    """The value of --name as a whole number of at least ``least``."""
    text = options[name]
    if not re.fullmatch("[0-9]{1,9}", text) or int(text) < least:
        raise UserError(f"--{name}: {text!r} is not a whole number of at least {least}")
    return int(text)


def positive(options: Mapping[str, str], name: str) -> float:
    """The value of --name as a number above zero; ``inf`` counts."""
    try:
        number = float(options[name])
    except ValueError:
        number = math.nan
    if not number > 0:
        raise UserError(f"--{name}: {options[name]!r} is not a number above zero")
    return number


def refuse_what_would_be_lost(job: Job, otherwise: str = "") -> None:
    """UserError for a run's directory on the machines' own disks, which are gone when the job is."""
    workdir = value_of("workdir", job.arguments)
    if workdir and "://" not in workdir and not workdir.startswith("/"):
        raise UserError(
            f"--workdir: {workdir!r} would be on the machines and deleted with them; "
            f"give a gs:// path, or an absolute one on a mounted disk{otherwise}"
        )
