"""Ctrl-C and SIGTERM while something costs money: the first ends the work and cleans up, a second leaves at once."""

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stopped(BaseException):
    """A signal asked the launch to end; its exit status is 128 + the signal's number."""

    def __init__(self, number: int):
        super().__init__(signal.Signals(number).name)
        self.status = 128 + number


class Interrupts:
    """``cleaning`` is set once the clean-up has begun, which a first signal does not cut short."""

    def __init__(self, left: Callable[[], str], say: Callable[[str], None]) -> None:
        self.cleaning = False
        self._left, self._say, self._seen = left, say, False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self._seen:
            sys.stderr.write(self._left() + "\n")  # not by ``say``, whose lock the interrupted code may hold
            sys.stderr.flush()
            os._exit(128 + number)
        self._seen = True
        if not self.cleaning:
            raise Stopped(number)
        self._say("cleaning up; a second signal leaves at once")


@contextlib.contextmanager
def interruptible(left: Callable[[], str], say: Callable[[str], None]) -> Iterator[Interrupts]:
    """Inside, the first signal raises Stopped; a second prints ``left()``, what is still there, and ends the process.

    Signals that were ignored before, as SIGHUP under nohup, stay ignored.
    """
    handler = Interrupts(left, say)
    before = {number: signal.getsignal(number) for number in SIGNALS}
    changed = [number for number in SIGNALS if before[number] is not signal.SIG_IGN]
    for number in changed:
        signal.signal(number, handler)
    try:
        yield handler
    finally:
        for number in changed:
            signal.signal(number, before[number])
