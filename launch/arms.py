"""Every arm of a study as a job of its own, all at once, and then one more that compares what they found.

Each is a launch like any other, with a name of its own: one that ends early, fails or is started again leaves the
others alone. What is done is kept in runs/launch/NAME/arms.json until all is done.
"""

import contextlib
import hashlib
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from launch.arguments import value_of, whole
from launch.errors import UserError
from launch.fits import refuse_unless_it_fits
from launch.job import Job
from launch.processes import Group, Stopped
from launch.tools import ToolError, say

ALONE = ("--budget_hours=inf",)  # what fits into a budget is known of all arms together


def jobs(job: Job) -> dict[str | None, Job]:
    """A job for each arm of the study that ``job`` runs, by the arm's name; and by None the one that compares them."""
    if job.arguments[0] != "study":
        raise UserError(f"--each_arm: {job.arguments[0]} has none; they are a study's, of a --config with get_study")
    if value_of("arm", job.arguments) is not None:
        raise UserError("--each_arm: all of them, and --arm is one of them; give one of the two")
    found: dict[str | None, Job] = {
        arm: Job(name=_name(job.name, arm), arguments=(*job.arguments, f"--arm={arm}", *ALONE))
        for arm in _names(job.arguments)
    }
    return found | {None: Job(name=job.name, arguments=(*job.arguments, *ALONE))}


def act(where: str, action: str, job: Job, argv: Sequence[str], options: Mapping[str, str]) -> int:
    """Submit, show, follow or stop the jobs of all arms; after a submission also compare. 0 where all went well.

    ``argv`` is the launcher's command line without the place and the action, ``options`` its flags of the place.
    """
    words = [word for word in argv if not re.match(r"--(name|each_arm)(=|$)", word)]
    start = [sys.executable, "-m", "launch", where, *([] if action == "submit" else [action])]
    found = jobs(job)
    if action == "submit" and options.get("topology"):  # asked once for all arms
        slices, force = whole(options, "slices"), options["force"] == "true"
        refuse_unless_it_fits(job.arguments, options["topology"], slices, force, say)
        words += [] if force else ["--force"]
    commands = {
        arm: [*start, f"--name={one.name}", *words, *one.arguments[len(job.arguments) :]] for arm, one in found.items()
    }
    last, group = commands.pop(None), Group()
    named = [(str(arm), command) for arm, command in commands.items()]
    try:
        if action != "submit":
            return max(group.each([*named, ("comparison", last)]))
        return _submit(job, named, last, options.get("detach") == "true", group)
    except Stopped as stopped:
        return stopped.status


def _submit(job: Job, named: list[tuple[str, list[str]]], last: list[str], detach: bool, group: Group) -> int:
    record = Path("runs", "launch", job.name, "arms.json")
    done = _read(record, job)
    left = [(arm, command) for arm, command in named if arm not in done]

    def ended(i: int, status: int) -> None:
        if status == 0 and not detach:
            done.append(left[i][0])
            _write(record, job, done)

    statuses = group.each(left, ended)
    failed = {arm: status for (arm, _), status in zip(left, statuses, strict=True) if status}
    if group.signals:
        raise Stopped(next(iter(failed.values()), 128 + group.signals[0]))
    if failed:
        told = ", ".join(f"{arm!r} with {status}" for arm, status in failed.items())
        say(f"ended {told}; the same command launches these again, and compares when all are done")
        return next(iter(failed.values()))
    if detach:
        words = [word for word in last[1:] if not re.match("--detach(=|$)", word)]
        say(f"when all have ended: {shlex.join(['python', *words])}")
        return 0
    (status,) = group.each([("comparison", last)])
    if group.signals:
        raise Stopped(status or 128 + group.signals[0])
    if status == 0:
        with contextlib.suppress(OSError):
            record.unlink()
    return status


def _names(arguments: Sequence[str]) -> list[str]:
    """The study's arms, as the command itself tells them."""
    command = [sys.executable, "-m", "transformer", *arguments, "--list_arms", "--json"]
    found = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    told = " ".join(found.stderr.splitlines()[-1:])
    if found.returncode == 2:
        raise UserError(told.removeprefix("error: "))
    if found.returncode:
        raise ToolError(f"the study's arms could not be listed: {told or found.returncode}")
    try:
        names: list[str] = json.loads(found.stdout.splitlines()[-1])["arms"]
    except (ValueError, IndexError):
        raise ToolError("the study's arms could not be listed: its file prints something else last") from None
    return names


def _name(study: str, arm: str) -> str:
    """A job's name that tells the arm, and no other's."""
    told_apart = hashlib.sha256(f"{study}\0{arm}".encode()).hexdigest()[:6]
    short = re.sub("[^a-z0-9]+", "-", arm.lower()).strip("-")[:8].strip("-")
    return "-".join(filter(None, (study[:24].rstrip("-"), short, told_apart)))


def _read(record: Path, job: Job) -> list[str]:
    """The arms that are done, of a launch with the same arguments."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        found: Any = json.loads(record.read_text())
        if found["arguments"] == list(job.arguments):
            return list(found["done"])
    return []


def _write(record: Path, job: Job, done: Sequence[str]) -> None:
    with contextlib.suppress(OSError):  # a place that cannot be written: the next launch asks the jobs themselves
        record.parent.mkdir(parents=True, exist_ok=True)
        record.write_text(json.dumps({"arguments": list(job.arguments), "done": list(done)}))
