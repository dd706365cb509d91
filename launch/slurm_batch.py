"""What a Slurm job runs on its first node: srun, and then what its end means.

    python -m launch.slurm_batch --directory=... --archive=... --attempts=... --chips=... --chip_hours=... -- srun ...

The end of a job of many tasks is that of the task which failed first; the others only follow. Killed, and stopped after
a save, is tried again: the job goes back into the queue under its number, and the same command resumes.
"""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import IO

from launch.arguments import positive, split, whole
from launch.attempts import Limits, again
from launch.code import ROOT, verify
from launch.errors import UserError

GRACE = 60.0  # seconds after the first failure in which all tasks must have left
TICK = 5.0  # seconds between two looks at the clock
ENDED, OUTPUT, HOURS = "ended", "output", "chip_hours"  # files in the job's directory
FLAGS: dict[str, tuple[str | None, str]] = {
    "directory": (None, "where the job's script and log are"),
    "archive": (None, "the code that was launched, as it was packed"),
    "attempts": (None, "how often in all to start the job"),
    "chips": (None, "how many chips the job holds"),
    "chip_hours": (None, "how many chip-hours it may use in all"),
}
FAILURE = re.compile(rb"srun: error: \S+: tasks? [\d,-]+: (.+)")  # what srun says when a task has failed
SIGNALS = {signal.strsignal(number): int(number) for number in signal.valid_signals()}


class Step:
    """One srun, and the first failure among its tasks."""

    def __init__(self, command: list[str], output: Path):
        self.failed: int | None = None
        self.failed_at = 0.0
        self.srun = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        assert self.srun.stdout and self.srun.stderr
        self.readers = [
            threading.Thread(target=self._read, args=(self.srun.stderr,)),
            threading.Thread(target=self._copy, args=(self.srun.stdout, output)),
        ]
        for reader in self.readers:
            reader.start()

    def _read(self, errors: IO[bytes]) -> None:
        for line in errors:
            os.write(2, line)
            status = failure(line)
            if status and self.failed is None:
                self.failed, self.failed_at = status, time.monotonic()

    def _copy(self, printed: IO[bytes], output: Path) -> None:
        """All of it to the log, and what the first task prints to a file of its own."""
        with output.open("wb", buffering=0) as first:
            for line in printed:
                os.write(1, line)
                label, _, text = line.partition(b": ")
                if label.strip() == b"0":
                    first.write(text)

    def wait(self, seconds: float) -> int | None:
        """The exit status, or None after so long."""
        try:
            status = self.srun.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        for reader in self.readers:
            reader.join()
        status = self.failed or status
        return status if status >= 0 else 128 - status


def failure(line: bytes) -> int:
    """The exit status of the task that this line of srun's is about; 0 where it is about no failed task."""
    found = FAILURE.match(line)
    if not found:
        return 0
    what = found[1].decode(errors="replace").removesuffix(" (core dumped)")
    code = re.fullmatch(r"Exited with exit code (\d+)", what)
    if code:
        return int(code[1])
    return 128 + SIGNALS[what] if what in SIGNALS else 1


def run(directory: Path, archive: Path, limits: Limits, command: list[str]) -> int:
    """Run one attempt; put the job back into the queue where that is right; the exit status."""
    number, attempt = os.environ["SLURM_JOB_ID"], 1 + int(os.environ.get("SLURM_RESTART_COUNT", "0"))
    if attempt > limits.attempts:  # Slurm by itself starts a job again whose node is lost, or is wanted for another
        return _end(directory, number, 137, f"the node was lost or taken in attempt {limits.attempts}: given up")
    verify(archive.read_bytes(), ROOT)
    if attempt > 1:
        _say(f"attempt {attempt} of {limits.attempts}")
    signal.signal(signal.SIGTERM, lambda *_: None)  # the tasks have it too; this one waits for how they end
    used, begun = _hours(directory, attempt), time.monotonic()
    step, dear, told = Step(command, directory / OUTPUT), False, False
    while (status := step.wait(TICK)) is None:
        hours = used + (time.monotonic() - begun) / 3600 * limits.chips
        _write(directory / HOURS, str(hours))
        if hours > limits.chip_hours and not dear:
            dear = True
            _say(f"{limits.chip_hours:g} chip-hours are used: the job is to save and to leave")
            subprocess.run(["scancel", "--signal=TERM", number])
        if step.failed and time.monotonic() - step.failed_at > GRACE and not told:
            told = True
            _say(f"a task failed {GRACE:.0f} s ago: the others are ended")
            subprocess.run(["scancel", "--signal=KILL", number])
    if not again(status):
        return _end(directory, number, status)
    if dear:
        return _end(directory, number, status, f"exit status {status} after its chip-hours: given up")
    if attempt == limits.attempts:
        return _end(directory, number, status, f"exit status {status} after attempt {attempt}: given up")
    # A job that somebody cancels ends as one that is preempted does, and Slurm would start that again as well.
    if "JobState=RUNNING " not in _show(number):
        return _end(directory, number, status)
    _say(f"exit status {status}: back into the queue, from the last checkpoint")
    if subprocess.run(["scontrol", "requeue", number]).returncode:
        return _end(directory, number, status, "this Slurm puts no job back into the queue")
    return status


def _end(directory: Path, number: str, status: int, why: str = "") -> int:
    if why:
        _say(why)
    _write(directory / ENDED, f"{number} {status}")
    return status


def _hours(directory: Path, attempt: int) -> float:
    """What this job's earlier attempts used."""
    try:
        return float((directory / HOURS).read_text()) if attempt > 1 else 0.0
    except (OSError, ValueError):
        return 0.0


def _write(path: Path, text: str) -> None:
    part = path.with_name(path.name + ".part")
    part.write_text(text)
    part.replace(path)


def _show(number: str) -> str:
    shown = subprocess.run(["scontrol", "show", "job", "-o", number], stdout=subprocess.PIPE)
    return shown.stdout.decode(errors="replace")


def _say(line: str) -> None:
    print(f"launch: {line}", file=sys.stderr, flush=True)


def main(argv: list[str]) -> int:
    cut = argv.index("--")
    options, _ = split(argv[:cut], FLAGS)
    directory = Path(options["directory"])
    limits = Limits(
        attempts=whole(options, "attempts"),
        chips=whole(options, "chips"),
        chip_hours=positive(options, "chip_hours"),
    )
    try:
        return run(directory, Path(options["archive"]), limits, argv[cut + 1 :])
    except UserError as error:
        return _end(directory, os.environ["SLURM_JOB_ID"], 2, str(error))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
