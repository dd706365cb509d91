"""Stopping by signal: at once, or, inside ``deferred``, at the next safe moment.

Python runs a signal's handler between two of its own instructions, so not while a library works in this thread
(SentencePiece trains, an older JAX compiles), which can take minutes. Where leaving at once is right, a thread that the
signal wakes sees to it that the process does.
"""

import contextlib
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any

from transformer.parallel import ending

SIGNALS = (signal.SIGTERM, signal.SIGINT)
GRACE = 2.0  # seconds for Python's own handler to run before the thread ends the process


class Stop(BaseException):
    """A signal asked the program to end; its exit status is 128 + the signal's number."""

    def __init__(self, number: int):
        super().__init__(signal.Signals(number).name)
        self.status = 128 + number


class Asked:
    """``signal`` is the signal that came, or None; ``unsaved`` names the runs that have something to save first."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self.unsaved: set[Any] = set()


_asked: Asked | None = None  # set inside ``deferred``
_inside = 0  # how many are
_handled = -1e9  # when the handler last ran
_pipe: tuple[int, int] | None = None


def install() -> None:
    """From now on SIGTERM and Ctrl-C raise Stop wherever the program is."""
    global _pipe
    for number in SIGNALS:
        signal.signal(number, _handle)
    if _pipe is None:
        _pipe = os.pipe()
        os.set_blocking(_pipe[1], False)
        threading.Thread(target=_watch, args=(_pipe[0],), name="signals", daemon=True).start()
    signal.set_wakeup_fd(_pipe[1], warn_on_full_buffer=False)


@contextlib.contextmanager
def deferred(run: Any = None) -> Iterator[Asked]:
    """Inside, while anything is ``unsaved``, the first signal is only noted, for the loop to see; a second one stops.

    Those who are inside at the same time share what was asked; a ``run`` that leaves has nothing unsaved any more.
    """
    global _asked, _inside
    asked = _asked = _asked or Asked()
    _inside += 1
    try:
        yield asked
    finally:
        _inside -= 1
        asked.unsaved.discard(run)
        if not _inside:
            _asked = None


def leave_soon(status: int, after: float = 2 * GRACE) -> None:
    """The process ends with ``status`` within ``after`` seconds.

    Leaving waits for a library's threads to end, and one in which XLA compiles may take minutes.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # its reader has left, or it is closed
            stream.flush()
    timer = threading.Timer(after, os._exit, [status])
    timer.daemon = True
    timer.start()


def _handle(number: int, frame: FrameType | None) -> None:
    global _handled
    _handled = time.monotonic()
    if _asked is not None and _asked.unsaved and _asked.signal is None:
        _asked.signal = number
    else:
        raise Stop(number)


def _watch(pipe: int) -> None:
    noted: Asked | None = None  # who was left to see a first signal
    last: tuple[int, float] | None = None  # the last signal that the handler must have met by GRACE later, and when
    while True:
        # Never asleep while signals come: one that is read late would look as if nothing had handled it since.
        if not select.select([pipe], [], [], GRACE if last else None)[0]:
            assert last is not None
            number, came = last
            if _handled < came - GRACE / 2:  # the handler may have been faster than this thread
                ending.at_once(128 + number, f"stopped by {signal.Signals(number).name}")
            last = None
            continue
        for number in os.read(pipe, 64):
            if number not in SIGNALS or signal.getsignal(number) is not _handle:
                continue
            asked = _asked
            if asked is not None and asked.unsaved and asked is not noted:
                noted = asked
            else:
                last = number, time.monotonic()
