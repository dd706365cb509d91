"""Jobs of several real processes on this machine, each with some devices made of the CPU, joined by Gloo."""

import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.runs.whole import ROOT, Result

LIMIT = 150.0  # seconds that a job may take


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def environment(home: Path, devices: int, **more: str) -> dict[str, str]:
    """Programs are compiled quickly and once for all processes."""
    return os.environ | {
        "XLA_FLAGS": "",
        "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(devices),
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        "JAX_COMPILATION_CACHE_DIR": str(home / "programs"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        **more,
    }


def job(
    home: Path,
    processes: int,
    devices: int,
    *words: str,
    do: dict[int, str] | None = None,
    batches: str = "none",
    limit: float = LIMIT,
) -> list[Result]:
    """Run ``python -m transformer WORDS`` as so many processes; how each ended. ``do`` says what one does to itself."""
    port, running = free_port(), []
    for number in range(processes):
        joined = [f"--coordinator=127.0.0.1:{port}", f"--processes={processes}", f"--process={number}"]
        out, err = (tempfile.TemporaryFile("w+", dir=home) for _ in "oe")  # noqa: SIM115
        environ = environment(
            home,
            devices,
            DO=(do or {}).get(number, ":0"),
            BATCHES=str(home / f"{batches}.{number}.batches"),
        )
        command = [sys.executable, "-m", "transformer", *words, *(joined if processes > 1 else [])]
        running.append((subprocess.Popen(command, cwd=home, env=environ, stdout=out, stderr=err), out, err))
    until = time.monotonic() + limit
    try:
        for process, _, _ in running:
            process.wait(max(0.1, until - time.monotonic()))
    finally:
        found = []
        for process, *files in running:
            process.kill()
            process.wait()
            texts = []
            for file in files:
                with file:
                    file.seek(0)
                    texts.append(file.read())
            found.append(Result(process.returncode, *texts))
    return found
