"""The processes of one job on this machine: the signals that reach them, what they print, and how they end."""

import os
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from types import FrameType
from typing import IO

FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
SETTLE = 3.0  # seconds after the first failure in which the others may see it and leave by themselves
GRACE = 20.0  # seconds after the first failure in which they must have left


class Stopped(Exception):
    """A signal ended the job, so it is not to be tried again."""

    def __init__(self, status: int):
        super().__init__(f"exit status {status}")
        self.status = status


class Group:
    """From the moment that it is made, SIGTERM, Ctrl-C and SIGHUP go to the processes of ``start``, to each once."""

    def __init__(self) -> None:
        self.signals: list[int] = []  # that came
        self._early: list[int] = []  # of them, those that came while processes were being started
        self._starting = False
        self._processes: list[subprocess.Popen[bytes]] = []
        for wanted in FORWARDED:
            if signal.getsignal(wanted) is not signal.SIG_IGN:  # stays ignored, as under nohup
                signal.signal(wanted, self._forward)

    def _forward(self, number: int, frame: FrameType | None) -> None:
        self.signals.append(number)
        if self._starting:
            self._early.append(number)
        else:
            self._send(number)

    def _send(self, number: int) -> None:
        for process in self._processes:
            process.send_signal(number)  # does nothing where it has ended

    def start(self, commands: Sequence[Sequence[str]]) -> int:
        """Run one process per command to their ends; the first failure's exit status, 128 + N for signal N.

        One process prints as it likes. Of several, the first one's standard output passes; lines of standard error
        begin with the process's number. When one fails the others are ended too. Raises Stopped after a signal.
        """
        if self.signals:
            raise Stopped(128 + self.signals[0])
        several = len(commands) > 1
        self._processes, self._starting = [], True
        for i, command in enumerate(commands):
            # A process group of its own: Ctrl-C reaches it once, from here, and not from the terminal as well.
            self._processes.append(
                subprocess.Popen(
                    command,
                    process_group=0,
                    stdout=subprocess.DEVNULL if i else None,
                    stderr=subprocess.PIPE if several else None,
                )
            )
        self._starting = False
        while self._early:
            self._send(self._early.pop(0))
        readers = [threading.Thread(target=_number, args=item, daemon=True) for item in enumerate(self._errors())]
        for reader in readers:
            reader.start()
        status = self._wait()
        for reader in readers:
            reader.join(timeout=5.0)  # a process that a process left behind may keep its pipe open
        if self.signals:
            raise Stopped(status)
        return status

    def _errors(self) -> list[IO[bytes]]:
        return [process.stderr for process in self._processes if process.stderr]

    def _wait(self) -> int:
        first, failed_at, told = 0, 0.0, False
        live = self._processes
        while live:
            time.sleep(0.02)
            ended = [code for process in live if (code := process.poll()) is not None]
            live = [process for process in live if process.returncode is None]
            failures = sorted((code for code in ended if code), key=lambda code: code > 0)
            if failures and not first:  # of two at once, the one that was killed is the cause
                first, failed_at = failures[0], time.monotonic()
            since = time.monotonic() - failed_at
            if first and since > SETTLE and not told and not self.signals:  # a second signal would cut a save short
                told = True
                self._send(signal.SIGTERM)
            if first and since > GRACE:
                self._send(signal.SIGKILL)
        return first if first >= 0 else 128 - first

    def sleep(self, seconds: float) -> None:
        """Wait, but not on after a signal."""
        until = time.monotonic() + seconds
        while not self.signals and time.monotonic() < until:
            time.sleep(0.05)


def _number(i: int, pipe: IO[bytes]) -> None:
    for line in pipe:
        os.write(2, b"%d: %s\n" % (i, line.rstrip(b"\n")))  # one write, so that lines of several stay whole
