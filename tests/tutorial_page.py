"""docs/the_whole_model.md, run: `python -m tests.tutorial_page` (`make docs`) writes its measured lines anew.

Below a command a line that starts with `>` is in the output as it stands. One that starts with `~` is in it with other
numbers and bars (small models trained for less, or on another machine, give others); the page says what they were where
it was made.
"""

import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "the_whole_model.md"
COMMAND, INDENT = "    python -m transformer ", "    "
NUMBER = re.compile(r"[+-]?\d[\d,.]*")


class Step(NamedTuple):
    """A command of the page, in words, and its quoted lines: their number in the page, mark and text."""

    words: list[str]
    quoted: list[tuple[int, str, str]]


def steps(page: str) -> Iterator[Step]:
    """The commands of the page in their order."""
    found: Step | None = None
    for i, line in enumerate(page.splitlines()):
        if line.startswith(COMMAND):
            if found:
                yield found
            words = [re.sub("=experiments/", f"={ROOT}/experiments/", w) for w in shlex.split(line[len(COMMAND) :])]
            found = Step(words, [])
        elif found and line.startswith((f"{INDENT}> ", f"{INDENT}~ ")):
            found.quoted.append((i, line[len(INDENT)], line[len(INDENT) + 2 :]))
    if found:
        yield found


def form(line: str) -> str:
    """A line without its numbers, bars and spaces."""
    return " ".join(NUMBER.sub("0", line.replace("█", " ")).split())


def find(mark: str, wanted: str, out: str) -> str | None:
    """The line of the output that a quoted line stands for: of several forms alike, that with most of its numbers."""
    lines = [line.strip() for line in out.splitlines()]
    if mark == ">":
        return wanted if wanted in lines else None
    numbers = set(NUMBER.findall(wanted))
    alike = [line for line in lines if form(line) == form(wanted)]
    return max(alike, key=lambda line: len(numbers & set(NUMBER.findall(line))), default=None)


def main() -> None:
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    with tempfile.TemporaryDirectory() as folder:
        for step in steps("\n".join(lines)):
            print("python -m transformer", *step.words, file=sys.stderr, flush=True)
            command = [sys.executable, "-m", "transformer", *step.words]
            out = subprocess.run(command, cwd=folder, check=True, stdout=subprocess.PIPE, text=True).stdout
            for i, mark, wanted in step.quoted:
                line = find(mark, wanted, out)
                if line is None:
                    raise SystemExit(f"{PAGE.name}, line {i + 1}: not in the output, which is:\n{out}")
                lines[i] = f"{INDENT}{mark} {line}"
    PAGE.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
