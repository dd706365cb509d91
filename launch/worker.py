"""The part of a launch that runs on a worker: start the job so that it outlives the connection, follow it, stop it.

Sent to every worker and run there by whatever `python3` it has (3.8 or newer), so it imports nothing of this project.
Everything lies in one directory of the worker: `new/` as it was sent, `code-ID/`, `log`, `status`.

    worker.py begin DIR ID SHA256   check what was sent; print new, running, other (another job runs) or done
    worker.py start DIR ID          start the job anew; print how long the log is before it
    worker.py follow DIR OFFSET     print the log from there until the job ends; leave with its exit status
    worker.py state DIR             print running, ended STATUS or nothing
    worker.py stop DIR SECONDS      SIGTERM, and SIGKILL after so many seconds; only what was started here
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

GONE = 254  # no exit status was left: the job was killed with its keeper, or the machine has started anew
STOPPED = 130  # ended on request: never tried again


def read(path: Path, default: str = "") -> str:
    return path.read_text() if path.exists() else default


def write(path: Path, content: object) -> None:
    """All of it or nothing."""
    path.with_suffix(".part").write_text(str(content))
    path.with_suffix(".part").rename(path)


def running(folder: Path) -> bool:
    """Whether the job lives: it and its keeper hold a lock as long as they do, and no later process can."""
    if not (folder / "lock").exists():
        return False
    with open(folder / "lock") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def begin(folder: Path, job: str, digest: str) -> None:
    found = hashlib.sha256((folder / "new" / "code.tar.gz").read_bytes()).hexdigest()
    if found != digest:
        sys.exit(f"the code arrived damaged: its SHA-256 is {found}, not {digest}")
    same = read(folder / "id") == job
    if (folder / "status").exists():
        print("done" if same and read(folder / "status") == "0" else "new")
    elif running(folder):
        print("running" if same else "other")
    else:
        print("new")


def start(folder: Path, job: str) -> None:
    stop(folder, 5)  # what is left of the attempt before it
    code = folder / f"code-{job[:12]}"
    if not code.exists():  # an attempt after the first goes on in the directory of the one before it
        shutil.rmtree(folder / "unpacking", ignore_errors=True)
        with tarfile.open(folder / "new" / "code.tar.gz") as archive:
            if hasattr(tarfile, "data_filter"):  # older releases know no filter, newer ones want one
                archive.extraction_filter = tarfile.data_filter
            archive.extractall(folder / "unpacking")
        (folder / "unpacking").rename(code)
    for name in ("status", "stopping", "child", "lock"):
        if (folder / name).exists():
            (folder / name).unlink()
    write(folder / "id", job)
    with open(folder / "log", "ab") as log, open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the keeper inherits it
        subprocess.Popen(
            [sys.executable, __file__, "keep", str(folder), str(code), str(lock.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=[lock.fileno()],
            start_new_session=True,
        )
        print(log.tell())


def keep(folder: Path, code: str, lock: int) -> None:
    """Run setup and then the command; write down how it ended."""
    signal.signal(signal.SIGTERM, lambda *_: None)  # a machine that shuts down signals everyone; the job's end counts
    arguments = (folder / "new" / "arguments").read_bytes().split(b"\0")[:-1]
    environment = dict(os.environ, PYTHONUNBUFFERED="1")
    for line in read(folder / "new" / "environment").splitlines():
        name, _, value = line.partition("=")
        environment[name] = value
    setup = [b"bash", os.fsencode(folder / "new" / "setup")]
    command = [b".venv/bin/python", b"-m", b"transformer", *arguments]
    status = 0
    for step in (setup, command):
        child = subprocess.Popen(
            step, cwd=code, env=environment, stdin=subprocess.DEVNULL, start_new_session=True, pass_fds=[lock]
        )
        write(folder / "child", child.pid)
        if (folder / "stopping").exists():  # asked for before there was anything to stop
            os.killpg(child.pid, signal.SIGTERM)
        status = child.wait()
        status = 128 - status if status < 0 else status
        if step is setup and 0 < status < 128:
            print(f"setup failed with exit status {status}", flush=True)
            status = 1  # whatever its number: a 2 would be taken as the user's error
        if status:
            break
    if status == 143 and (folder / "stopping").exists():
        status = STOPPED
    write(folder / "status", status if status < GONE else 1)  # 255 is ssh's own


def follow(folder: Path, offset: int) -> None:
    parent = os.getppid()
    with open(folder / "log", "rb") as log:
        log.seek(offset)
        while True:
            over = (folder / "status").exists() or not running(folder)  # asked before the last read
            piece = log.read(1 << 16)
            sys.stdout.buffer.write(piece)
            sys.stdout.buffer.flush()
            if not piece:
                if over or os.getppid() != parent:  # the connection is gone
                    break
                time.sleep(0.2)
    sys.exit(int(read(folder / "status", str(GONE))))


def state(folder: Path) -> None:
    if (folder / "status").exists():
        print("ended", read(folder / "status"))
    elif running(folder):
        print("running")


def stop(folder: Path, seconds: float) -> None:
    if not running(folder):
        return
    write(folder / "stopping", "")
    deadline, sent = time.monotonic() + seconds, None
    while running(folder) and time.monotonic() < deadline + 10:
        wanted = signal.SIGTERM if time.monotonic() < deadline else signal.SIGKILL
        child = read(folder / "child")
        if child and wanted != sent:
            sent = wanted
            with contextlib.suppress(ProcessLookupError):
                os.killpg(int(child), wanted)
        time.sleep(0.1)


def main(action: str, directory: str, *rest: str) -> None:
    folder = Path(directory).resolve()
    if action == "begin":
        begin(folder, *rest)
    elif action == "start":
        start(folder, *rest)
    elif action == "keep":
        keep(folder, rest[0], int(rest[1]))
    elif action == "follow":
        follow(folder, int(rest[0]))
    elif action == "state":
        state(folder)
    elif action == "stop":
        stop(folder, float(rest[0]))


if __name__ == "__main__":
    main(*sys.argv[1:])
