"""How the processes of a job end: together, with one line and one exit status, whatever happens to one of them.

The first that ends with an error says so in the job's store of keys. The others look there, and leave with the same
status. A process that is killed says nothing: its peers notice when a collective fails or when its heartbeat stays
out, and the watchdog ends a job in which no step finishes. These leave with LOST, which launchers try again.
"""

import contextlib
import ctypes
import json
import os
import re
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

LOST = 255  # the exit status where a process of the job, or its machine, is gone or hangs; ssh's own for the same
LOOK = 0.5  # seconds between two looks at whether another process has ended
GRACE = 2.0  # seconds for this process to come to its own end after another's
LINGER = 6.0  # seconds that process 0 waits for the others to leave: the store of keys goes with it
GONE = "another process of the job is gone: it was killed, or its machine or the network failed"
END, LEFT = "transformer/end", "transformer/left"

patience = 0  # seconds without a finished step; 0: no watchdog
job: "Job | None" = None  # of several processes; None: this process is by itself
_leaving = threading.Lock()
_heard: Any = None  # what libraries printed


@dataclass
class Job:
    """``client`` is that of JAX's coordination service, which process 0 runs."""

    client: Any
    process: int
    processes: int


def join(client: Any, process: int, processes: int) -> None:
    """From now on this process ends with the others."""
    global job
    job = Job(client, process, processes)
    threading.Thread(target=_watch, name="peers", daemon=True).start()


def silence() -> None:
    """What libraries print goes to a file of its own; Python's own output goes on. An abort becomes one line.

    Gloo prints on standard output, where there is to be one JSON object, and XLA a page where a process is lost.
    """
    global _heard
    if _heard is not None:
        return
    sys.stdout.flush()
    _heard = tempfile.TemporaryFile()  # noqa: SIM115 (as long as the process)
    for number, name in ((1, "stdout"), (2, "stderr")):
        setattr(sys, name, os.fdopen(os.dup(number), "w", buffering=1))
        os.dup2(_heard.fileno(), number)
    ctypes.CDLL(None).signal(signal.SIGABRT, _aborted)


@ctypes.CFUNCTYPE(None, ctypes.c_int)
def _aborted(number: int) -> None:
    """XLA ends the process where a peer is lost, in C++: no exception that could be caught."""
    text = b""
    with contextlib.suppress(OSError):
        text = os.pread(_heard.fileno(), 1 << 20, 0)
    lost = b"distributed service" in text or b"oordination service" in text
    fatal = re.search(rb"^F\d.*?\] (.*)$", text, re.MULTILINE)
    what = fatal[1].decode(errors="replace")[:300] if fatal else "abort"
    _print(GONE if lost else f"failed: {what}")
    os._exit(LOST if lost else 1)


def is_loss(error: BaseException | None) -> bool:
    """Whether this is how the loss of another process shows here."""
    signs = r"gloo|nccl|unavailable|connection|remote process|heartbeat|coordination"
    return job is not None and type(error).__name__ == "JaxRuntimeError" and bool(re.search(signs, str(error), re.I))


def of(error: Exception) -> tuple[int, str]:
    """Status and line for an error that is nobody's fault we know of."""
    first = (str(error).splitlines() or [""])[0]
    if is_loss(error):
        return LOST, f"{GONE} ({first})"
    ours = type(error).__module__.startswith("transformer.")  # whose name says no more than its message
    return 1, f"failed: {first}" if ours else f"failed: {type(error).__name__}: {first} (--debug shows where)"


def leave(status: int, line: str) -> None:
    """The end of the program: waits for the others where all went well, and does not return where it did not.

    Prints ``line``, or that of the process that ended first, whose status is everyone's.
    """
    if job is None:
        _print(line)
    elif status == 0:
        try:
            job.client.wait_at_barrier("transformer/done", 24 * 3600 * 1000)
        except Exception:
            at_once(LOST, GONE)
        _leaving.acquire()
        import jax

        jax.distributed.shutdown()
    else:
        at_once(status, line)


def at_once(status: int, line: str) -> NoReturn:
    """`leave`, from any thread and wherever the program is."""
    while not _leaving.acquire(blocking=False):
        time.sleep(60)  # another thread does it
    if job is not None:
        status, line = _first_words(status, line)
    _print(line)
    sys.stdout.flush()
    if job is not None and job.process == 0:
        until = time.monotonic() + LINGER
        while time.monotonic() < until and len(_bounded(lambda: job.client.key_value_dir_get(LEFT)) or ()) < (
            job.processes - 1
        ):
            time.sleep(0.05)
        time.sleep(0.2)
    os._exit(status)


def _first_words(status: int, line: str) -> tuple[int, str]:
    """What the first process to end said; this one's where it is the first."""
    assert job is not None
    client, process = job.client, job.process
    _bounded(lambda: client.key_value_set(END, json.dumps([status, line, process])))
    said = _bounded(lambda: client.key_value_try_get(END))
    if process > 0:
        _bounded(lambda: client.key_value_set(f"{LEFT}/{process}", ""))
    if said is None:
        return status, line
    status, first, who = json.loads(said)
    return status, line if first == line or who == process else f"process {who}: {first}"


def _bounded(ask: Callable[[], Any], seconds: float = 3.0) -> Any:
    """What the store of keys answers; None where it does not, for it may be gone, or hang."""
    answer: list[Any] = []

    def work() -> None:
        with contextlib.suppress(Exception):
            answer.append(ask())

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    return answer[0] if answer else None


def _watch() -> None:
    """End this process where another has ended with an error."""
    assert job is not None
    while True:
        time.sleep(LOOK)
        if _leaving.locked():
            return
        try:
            said = job.client.key_value_try_get(END)
        except Exception:  # nothing was said, or the store is gone, which JAX's own heartbeat sees to
            continue
        time.sleep(GRACE)
        at_once(json.loads(said)[0], "")


@contextlib.contextmanager
def watchdog() -> Iterator[Callable[[], None]]:
    """Gives a function to call when a step is finished; the job ends where it is not called for ``patience`` seconds.

    It wakes at the first call: the first step is compiled, which takes as long as it takes. Seconds are counted one by
    one, so that a process that was halted does not find that hours went by.
    """
    left, stop = float("inf"), threading.Event()

    def finished() -> None:
        nonlocal left
        left = float(patience)

    def watch() -> None:
        nonlocal left
        while not stop.wait(1.0):
            left -= 1
            if left < 0:
                at_once(LOST, f"no step finished in {patience} s (--step_timeout): a process hangs, or is gone")

    if patience:
        threading.Thread(target=watch, name="watchdog", daemon=True).start()
    try:
        yield finished
    finally:
        stop.set()


def _print(line: str) -> None:
    if line:
        with contextlib.suppress(OSError, ValueError):
            print(line, file=sys.stderr, flush=True)
