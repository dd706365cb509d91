"""Stopping by signal: at once, or, inside ``deferred``, at the next safe moment."""

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Stop(BaseException):
    """A signal asked the program to end; its exit status is 128 + the signal's number."""

    def __init__(self, number: int):
        super().__init__(signal.Signals(number).name)
        self.status = 128 + number


class Asked:
    """``signal`` is the signal that came, or None."""

    signal: int | None = None


def _at_once(number: int, frame: FrameType | None) -> None:
    raise Stop(number)


def install() -> None:
    """From now on SIGTERM and Ctrl-C raise Stop wherever the program is."""
    for number in SIGNALS:
        signal.signal(number, _at_once)


@contextlib.contextmanager
def deferred() -> Iterator[Asked]:
    """Inside, the first signal is only noted, for the loop to see; a second one stops at once."""
    asked = Asked()

    def note(number: int, frame: FrameType | None) -> None:
        if asked.signal is not None:
            raise Stop(number)
        asked.signal = number

    before = [signal.signal(number, note) for number in SIGNALS]
    try:
        yield asked
    finally:
        for number, handler in zip(SIGNALS, before, strict=True):
            signal.signal(number, handler)
