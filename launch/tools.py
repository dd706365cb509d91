"""Running the user's own command-line tools: gcloud, kubectl, ssh-keygen."""

import json
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from launch.errors import UserError


class ToolError(Exception):
    """A tool ended with an error; its message is the tool's own, on one line."""


def run(command: Sequence[str], stdin: bytes = b"", limit: float = 600.0) -> bytes:
    """What the command prints on standard output; ToolError where its exit status is not 0.

    It runs in a process group of its own, so that Ctrl-C does not cut a creation short: whatever was asked of the
    cloud is known to have been done, or not, before anything is cleaned up.
    """
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, process_group=0
        )
    except FileNotFoundError:
        raise UserError(f"{command[0]} is not installed here; this place is reached through it") from None
    try:
        out, err = process.communicate(stdin, timeout=limit)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise ToolError(f"{_short(command)} did not end within {limit:.0f} s") from None
    except BaseException:
        process.wait()
        raise
    if process.returncode:
        lines = [line.strip() for line in err.decode(errors="replace").splitlines() if line.strip()]
        at = [i for i, line in enumerate(lines) if line.startswith(("ERROR", "error", "Error"))]
        told = lines[at[0] : at[0] + 3] if at else lines[-1:]
        raise ToolError(" ".join(told) or f"{_short(command)} ended with exit status {process.returncode}")
    return out


def reading(command: Sequence[str]) -> subprocess.Popen[bytes]:
    """The command, begun, with what it prints to be read as it comes; Ctrl-C does not reach it."""
    return subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, process_group=0
    )


def pass_on(who: str, line: bytes) -> None:
    """Print a line of one of several, with its name; in one write, so that lines of all stay whole."""
    sys.stdout.buffer.write(who.encode() + b": " + line.rstrip(b"\n") + b"\n")
    sys.stdout.buffer.flush()


def say(text: str) -> None:
    """What the launcher itself has to say."""
    print(f"launch: {text}", file=sys.stderr, flush=True)


def ask(command: Sequence[str]) -> Any:
    """What a command prints as JSON."""
    return json.loads(run(command) or "null")


def ask_all(commands: Sequence[Sequence[str]]) -> list[Any]:
    """The same of several, run at once."""
    with ThreadPoolExecutor(len(commands)) as pool:
        return list(pool.map(ask, commands))


def _short(command: Sequence[str]) -> str:
    return " ".join(word for word in command[:5] if not word.startswith("-"))
