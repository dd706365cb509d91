"""The processes of one job on this machine: the signals that reach them, what they print, and how they end."""

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import IO

from launch.tools import ToolError

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
        self._begin(commands, lambda i: (subprocess.DEVNULL if i else None, subprocess.PIPE if several else None))
        errors = [(str(i), process.stderr) for i, process in enumerate(self._processes) if process.stderr]
        with _passing_on(errors):
            status = self._wait()
        if self.signals:
            raise Stopped(status)
        return status

    def each(
        self, commands: Sequence[tuple[str, Sequence[str]]], ended: Callable[[int, int], None] = lambda i, status: None
    ) -> list[int]:
        """Run one process per name and command to its end, whatever becomes of the others; the exit status of each,
        128 + N for signal N. All that they print begins with their names. ``ended`` hears of each as it ends.

        A signal reaches all of them, and is for the caller to look for in ``signals``.
        """
        if self.signals:
            raise Stopped(128 + self.signals[0])
        self._begin([command for _, command in commands], lambda i: (subprocess.PIPE, subprocess.PIPE))
        named = [(name, p) for (name, _), p in zip(commands, self._processes, strict=True)]
        errors, outs = ([(n, p.stderr) for n, p in named if p.stderr], [(n, p.stdout) for n, p in named if p.stdout])
        found: dict[int, int] = {}
        with _passing_on(errors), _passing_on(outs, 1):
            while len(found) < len(named):
                time.sleep(0.02)
                for i, (_, process) in enumerate(named):
                    if i not in found and (code := process.poll()) is not None:
                        found[i] = code if code >= 0 else 128 - code
                        ended(i, found[i])
        return [found[i] for i in range(len(named))]

    def _begin(self, commands: Sequence[Sequence[str]], pipes: Callable[[int], tuple[int | None, int | None]]) -> None:
        self._processes, self._starting = [], True
        try:
            for i, command in enumerate(commands):
                out, err = pipes(i)
                # A process group of its own: Ctrl-C reaches it once, from here, and not from the terminal as well.
                self._processes.append(subprocess.Popen(command, process_group=0, stdout=out, stderr=err))
        except OSError as error:  # too many files or processes: what was begun has no owner otherwise
            self._send(signal.SIGTERM)
            for process in self._processes:
                process.communicate()
            raise ToolError(f"{len(commands)} processes cannot be started: {error.strerror}") from error
        finally:
            self._starting = False
        while self._early:
            self._send(self._early.pop(0))

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


@contextlib.contextmanager
def _passing_on(pipes: Sequence[tuple[str, IO[bytes]]], to: int = 2) -> Iterator[None]:
    """Inside and until their ends, every line of each pipe goes to the file ``to``, with a name before it."""

    def read(name: str, pipe: IO[bytes]) -> None:
        heard = True
        for line in pipe:  # to its end, also where nobody hears it: a process must not wait for that
            try:
                if heard:  # one write, so that lines stay whole
                    os.write(to, b"%s: %s\n" % (os.fsencode(name), line.rstrip(b"\n")))
            except OSError:
                heard = False
                if to == 1:  # whoever read it has left, as from a single launch
                    os.kill(os.getpid(), signal.SIGTERM)

    readers = [threading.Thread(target=read, args=item, daemon=True) for item in pipes]
    for reader in readers:
        reader.start()
    yield
    for reader in readers:
        reader.join(timeout=5.0)  # a process that a process left behind may keep its pipe open
