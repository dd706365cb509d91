"""What is launched, and what a place where it can run must offer."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from launch.errors import UserError

NAME = re.compile(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?")  # what Cloud TPU, Kubernetes and Slurm all take


@dataclass(frozen=True, kw_only=True)
class Job:
    """One command on every host of one set of machines: a run, or one arm of a study.

    ``name`` names everything that is made for it, so that a second launch finds the first. ``arguments`` are those
    of `python -m transformer`, the command first; they reach every host byte for byte.
    """

    name: str
    arguments: tuple[str, ...]

    def __post_init__(self) -> None:
        if not NAME.fullmatch(self.name):
            raise UserError(
                f"--name: {self.name!r} is not a name; use at most 40 of a-z, 0-9 and -, a letter first, no - last"
            )

    def command(self, python: str = "python") -> list[str]:
        """The argument list that every host executes."""
        return [python, "-m", "transformer", *self.arguments]


class Place(Protocol):
    """A place is a module with these functions. ``options`` are its own flags, each a string by its name."""

    OPTIONS: Mapping[str, tuple[str | None, str]]
    """By flag name: the default (None where it must be given) and one line of help.

    A flag whose default is "false" may stand alone, for "true"; it never has another value than these two.
    """

    def render(self, job: Job, options: Mapping[str, str]) -> str:
        """Exactly what ``submit`` would run, and every file that it would write, ready to read or paste."""

    def submit(self, job: Job, options: Mapping[str, str]) -> int:
        """Start the job, or find it where it was started before; follow it to its end; its exit status."""

    def status(self, job: Job, options: Mapping[str, str]) -> str:
        """One line: where the job is now."""

    def logs(self, job: Job, options: Mapping[str, str]) -> int:
        """Print what the job has printed so far and, while it runs, what it prints."""

    def stop(self, job: Job, options: Mapping[str, str]) -> int:
        """End the job and delete what was made for it, and nothing else."""
