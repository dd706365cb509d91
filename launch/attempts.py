"""Which ends of a job are tried again, after how long, and when it is enough."""

import time
from collections.abc import Callable
from dataclasses import dataclass

AGAIN = (137, 143)  # killed, and stopped by SIGTERM after a save: what preemption looks like
LOST = 255  # ssh's own status where the connection or the machine went away


@dataclass(frozen=True, kw_only=True)
class Limits:
    """When to stop trying: attempts in all, and chip-hours in all."""

    attempts: int = 20
    chip_hours: float = float("inf")
    chips: int = 1
    pause: float = 10.0  # seconds before the second attempt


def again(status: int) -> bool:
    """Whether an exit status is worth another try from the last checkpoint; a user's error (2) never is."""
    return status in AGAIN or status == LOST


def attempts(
    start: Callable[[], int],
    limits: Limits,
    say: Callable[[str], None],
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> int:
    """Call ``start`` until its exit status is final or a limit is reached; the last exit status.

    Waits ``limits.pause``, twice that, ... 10 min between tries; an attempt of over ten minutes starts that anew.
    """
    begun, pause, count = clock(), limits.pause, 0
    while True:
        count, at = count + 1, clock()
        status = start()
        hours = (clock() - begun) / 3600 * limits.chips
        if not again(status):
            return status
        if count >= limits.attempts:
            say(f"exit status {status} after attempt {count} of {limits.attempts}: given up")
            return status
        if hours >= limits.chip_hours:
            say(f"exit status {status} after {hours:.1f} of {limits.chip_hours:g} chip-hours: given up")
            return status
        if clock() - at > 600:
            pause = limits.pause
        say(
            f"exit status {status}: attempt {count + 1} of {limits.attempts} in {pause:.0f} s, from the last checkpoint"
        )
        sleep(pause)
        pause = min(2 * pause, 600.0)
