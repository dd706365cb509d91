"""a Slurm cluster, on CPU or GPU nodes; the job puts itself back into the queue and resumes

Files of a job, in runs/launch/NAME: job.sh, NUMBER.log, and of the newest number how it ended and what it printed.
"""

import contextlib
import fcntl
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from launch.errors import UserError
from launch.job import Job
from launch.slurm_batch import ENDED, OUTPUT
from launch.slurm_script import directory, lay_out, make_plan, script

OPTIONS: dict[str, tuple[str | None, str]] = {
    "nodes": ("1", "how many nodes"),
    "gpus_per_node": ("0", "how many GPUs of each"),
    "tasks_per_node": ("", "JAX processes on each: 1, or one per GPU (default: one per GPU)"),
    "cpus_per_task": ("", "CPU cores of each process (default: what the cluster gives)"),
    "time": ("", "the longest that one attempt takes, as 24:00:00 (default: the partition's)"),
    "partition": ("", "where to queue (default: the cluster's)"),
    "account": ("", "who pays (default: yours)"),
    "sbatch": ("", "further options of sbatch, as --sbatch='--mem=64G --constraint=a100'"),
    "attempts": ("20", "how often in all to start a job that is killed, preempted or out of time"),
    "chip_hours": ("inf", "how many hours times GPUs (times nodes, where there are none) to use in all"),
    "python": (sys.executable, "the interpreter on the nodes"),
    "detach": ("false", "do not follow the job: print its number, and leave"),
}


def render(job: Job, options: Mapping[str, str]) -> str:
    return script(make_plan(job), job, options)


def _script(job: Job) -> Path:
    return directory(job) / "job.sh"


def submit(job: Job, options: Mapping[str, str]) -> int:
    plan = make_plan(job)
    text = os.fsencode(script(plan, job, options) + "\n")
    words = b"\0".join(map(os.fsencode, job.arguments))
    _slurm("sbatch", "--version")  # where there is no Slurm nothing is left behind
    plan.directory.mkdir(parents=True, exist_ok=True)
    with _locked(plan.directory):
        found = _find(job)
        if found:
            if (plan.directory / "arguments").read_bytes() != words:
                raise UserError(f"{job.name}: job {found.number} has this name and other arguments; use another --name")
            _say(f"{job.name} is job {found.number} already, {found.state.lower()}")
        else:
            lay_out(plan)
            for stale in (ENDED, OUTPUT):
                (plan.directory / stale).unlink(missing_ok=True)
            (plan.directory / "arguments").write_bytes(words)
            _script(job).write_bytes(text)
            number = _slurm("sbatch", "--parsable", str(_script(job))).strip().partition(";")[0]
            (plan.directory / "number").write_text(number)
            _say(f"{job.name} is job {number}; its log is {plan.directory / number}.log")
    number = _number(job)
    if options["detach"] == "true":
        print(number)
        return 0
    try:
        ended = _follow(job, number, 2)
    except KeyboardInterrupt:
        _say(f"job {number} goes on; python -m launch slurm stop --name={job.name} ends it")
        raise
    if (plan.directory / OUTPUT).is_file():
        sys.stdout.buffer.write((plan.directory / OUTPUT).read_bytes())
    return ended


def status(job: Job, options: Mapping[str, str]) -> str:
    found = _find(job)
    if found:
        return f"{job.name}: job {found.number}, {found.state.lower()}, {found.where}"
    number = _number(job)
    if not number:
        return f"{job.name}: never launched"
    return f"{job.name}: job {number} has ended with exit status {_ended(job, number)}"


def logs(job: Job, options: Mapping[str, str]) -> int:
    number = _number(job)
    if not number:
        raise UserError(f"{job.name}: never launched from here")
    _follow(job, number, 1)
    return 0


def stop(job: Job, options: Mapping[str, str]) -> int:
    while found := _find(job):  # until it is gone: one that was just going back into the queue is met there
        if found.state != "COMPLETING":
            try:
                _slurm("scancel", f"--name={job.name}", found.number)  # by number and name
            except UserError:
                if _find(job):  # it has not just ended by itself
                    raise
        time.sleep(1)
    return 0


@dataclass(frozen=True)
class Found:
    """A job in the queue."""

    number: str
    state: str
    where: str  # its nodes, or why it waits
    script: str


def _find(job: Job) -> Found | None:
    """The queued or running job of this user that a launch from here made under this name. UserError for another's."""
    listed = _slurm("squeue", "--me", "--noheader", f"--name={job.name}", "--format=%i|%T|%R|%o")
    found = [Found(*line.split("|", 3)) for line in listed.splitlines()]
    for one in found:
        if one.script != str(_script(job)):
            raise UserError(f"{job.name}: job {one.number} has this name and was not launched here; use another --name")
    if not found:
        return None
    if found[0].number != _number(job):  # the launch was killed before it could write the number down
        (directory(job) / "number").write_text(found[0].number)
    return found[0]


def _number(job: Job) -> str:
    try:
        return (directory(job) / "number").read_text()
    except OSError:
        return ""


def _follow(job: Job, number: str, to: int) -> int:
    """Write the log to file descriptor ``to``, to the end of the job; its exit status."""
    path, at, look = directory(job) / f"{number}.log", 0, 0.0
    while True:
        over = (directory(job) / ENDED).is_file() and _recorded(job, number) is not None
        if not over and time.monotonic() > look:
            look = time.monotonic() + 10
            with contextlib.suppress(UserError):  # a controller that does not answer now may do so later
                over = _find(job) is None
        with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
            file.seek(at)
            while part := file.read(1 << 16):
                at += len(part)
                os.write(to, part)
        if over:
            return _ended(job, number)
        time.sleep(0.5)


def _recorded(job: Job, number: str) -> int | None:
    try:
        ended, status = (directory(job) / ENDED).read_text().split()
    except (OSError, ValueError):
        return None
    return int(status) if ended == number else None


def _ended(job: Job, number: str) -> int:
    """The exit status of a job that is no more in the queue: its own word, else what Slurm makes of it."""
    recorded = _recorded(job, number)
    if recorded is not None:
        return recorded
    with contextlib.suppress(UserError):
        shown = _slurm("scontrol", "show", "job", "-o", number)
        state = re.search(r" JobState=(\w+)", shown)
        exits = re.search(r" ExitCode=(\d+):(\d+)", shown)
        if state and exits:
            _say(f"job {number} left no word; Slurm says {state[1]}")
            if state[1] in ("CANCELLED", "TIMEOUT", "PREEMPTED"):
                return 143
            if state[1] in ("NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL"):
                return 137
            return int(exits[1]) or (128 + int(exits[2]) if int(exits[2]) else 0)
    _say(f"job {number} is gone, and how it ended is not known")
    return 1


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Only one launch at a time looks for the job and queues it."""
    with (directory / "lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _slurm(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, timeout=120)
    except OSError:
        raise UserError(f"{command[0]}: not found; launch where Slurm's commands are") from None
    except subprocess.TimeoutExpired:
        raise UserError(f"{command[0]}: no answer from Slurm in two minutes") from None
    if done.returncode:
        said = os.fsdecode(done.stderr).strip().splitlines() or [f"exit status {done.returncode}"]
        raise UserError(f"{command[0]}: {said[0].removeprefix(f'{command[0]}: ').removeprefix('error: ')}")
    return os.fsdecode(done.stdout)


def _say(line: str) -> None:
    print(f"launch: {line}", file=sys.stderr, flush=True)
