"""Run the training command on this machine."""

import signal
import subprocess
import sys
from collections.abc import Sequence
from types import FrameType

FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def command(arguments: Sequence[str]) -> list[str]:
    """The argument list to execute. No shell ever reads it, so every value arrives as it was given."""
    return [sys.executable, "-m", "transformer", "train", *arguments]


def run(arguments: Sequence[str]) -> int:
    """Run the command to its end and return its exit status, 128 + N if signal N ended it."""
    child: subprocess.Popen[bytes] | None = None
    early: list[int] = []

    def forward(number: int, frame: FrameType | None) -> None:
        if child is None:
            early.append(number)
        else:
            child.send_signal(number)

    for wanted in FORWARDED:
        if signal.getsignal(wanted) is not signal.SIG_IGN:  # stays ignored, as under nohup
            signal.signal(wanted, forward)
    # A process group of its own: Ctrl-C reaches the child once, from here, and not from the terminal as well.
    child = subprocess.Popen(command(arguments), process_group=0)
    for number in early:
        child.send_signal(number)
    status = child.wait()
    return status if status >= 0 else 128 - status
