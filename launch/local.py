"""this machine, in the foreground; signals go to the job, and its exit status comes back"""

import contextlib
import fcntl
import os
import shlex
import signal
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from launch.arguments import whole
from launch.attempts import Limits, attempts
from launch.errors import UserError
from launch.job import Job
from launch.processes import Group, Stopped

OPTIONS: dict[str, tuple[str | None, str]] = {
    "processes": ("1", "JAX processes on this machine that form the one job; one process uses all devices anyway"),
    "attempts": ("1", "how often in all to start a job that is killed (137) or stopped from outside (143)"),
}


def commands(job: Job, options: Mapping[str, str]) -> list[list[str]]:
    """One argument list per process. No shell reads them, so every value arrives as it was given."""
    count = whole(options, "processes")
    if count == 1:
        return [job.command(sys.executable)]
    python, m, library, command, *words = job.command(sys.executable)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        together = [f"--coordinator=127.0.0.1:{free.getsockname()[1]}", f"--processes={count}"]
    return [[python, m, library, command, *together, f"--process={i}", *words] for i in range(count)]


def render(job: Job, options: Mapping[str, str]) -> str:
    whole(options, "attempts")
    lines = [shlex.join(command) for command in commands(job, options)]
    return lines[0] if len(lines) == 1 else "\n".join([*(f"{line} &" for line in lines), "wait"])


def submit(job: Job, options: Mapping[str, str]) -> int:
    limits = Limits(attempts=whole(options, "attempts"))
    whole(options, "processes")
    with _held(job):
        group = Group()
        try:
            # Every attempt has a port of its own: the last one's may still be taken.
            return attempts(lambda: group.start(commands(job, options)), limits, _say, group.sleep)
        except Stopped as stopped:
            return stopped.status


def status(job: Job, options: Mapping[str, str]) -> str:
    owner = _owner(job)
    return f"{job.name}: running, process {owner[1]} of {owner[0]}" if owner else f"{job.name}: not running"


def logs(job: Job, options: Mapping[str, str]) -> int:
    raise UserError(f"{job.name}: a local job prints where it was launched, and nowhere else")


def stop(job: Job, options: Mapping[str, str]) -> int:
    owner = _owner(job)
    if owner and owner[0] != socket.gethostname():
        raise UserError(f"{job.name}: runs on {owner[0]}; stop it there")
    if owner:
        os.kill(owner[1], signal.SIGTERM)
    while _owner(job):
        time.sleep(0.1)
    return 0


def _say(line: str) -> None:
    print(f"launch: {line}", file=sys.stderr, flush=True)


def _lock(job: Job) -> Path:
    """The file that a launch holds locked while its job runs; in it, the host and the launcher's process."""
    return Path("runs", "launch", job.name, "local")


@contextlib.contextmanager
def _held(job: Job) -> Iterator[None]:
    path = _lock(job)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a+")
    except OSError:  # a place that cannot be written: the job runs, and status and stop know nothing of it
        yield
        return
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = _owner(job)
            raise UserError(f"{job.name}: is running already{f', process {owner[1]}' if owner else ''}") from None
        file.truncate(0)
        file.write(f"{socket.gethostname()} {os.getpid()}")
        file.flush()
        yield


def _owner(job: Job) -> tuple[str, int] | None:
    """Host and process of the launch that runs the job now."""
    try:
        with _lock(job).open() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                host, process = file.read().split()
                return host, int(process)
    except (OSError, ValueError):
        pass
    return None
