"""The runs on disk: found by their config.json, read without JAX, and never trusted to be whole.

Whatever cannot be read in one file of a run is noted as that run's damage; all else of it, and every
other run, is read as ever.
"""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from transformer.errors import UserError
from transformer.files import CHECKPOINTS, CONFIG, PROVENANCE, in_use, read_provenance, saved_steps, stored_config
from transformer.jsons import read_object
from transformer.settings import as_number, flat
from transformer.training.metrics import METRICS, read

T = TypeVar("T")
Record = dict[str, Any]
INSIDE = (CHECKPOINTS, "tensorboard", "profile")  # large parts of a run that hold no other
DAMAGED, DONE, TRAINING, STOPPED, UNTRAINED = "damaged", "done", "training", "stopped", "never trained"
STEPS = "train.steps"
# Of provenance.json, besides command, code and time:
MACHINE = ("python", "versions", "devices", "host", "machine", "cores", "xla_flags")
DATA = ("content_hash", "tokenizer_hash")
EVALUATIONS = ("evaluation.json", "result.json")  # of a run by itself, and of a study's


@dataclass(frozen=True)
class RunFiles:
    """What the files of one run say. Where one cannot be read its part is empty, and ``damage`` has a line."""

    directory: Path
    settings: dict[str, Any]  # config.json by dotted name
    origin: dict[str, Any]  # provenance.json
    records: list[Record]  # metrics.jsonl
    timing: list[Record]
    evaluation: dict[str, Any]  # on the whole validation split, after training
    saved: list[int]  # steps of finished checkpoints
    training: bool  # now, by a process of this machine
    damage: list[str]

    @property
    def steps(self) -> int | None:
        """Of the whole training."""
        steps = self.settings.get(STEPS)
        return steps if type(steps) is int else None

    @cached_property
    def results(self) -> dict[str, Any]:
        """Every result of RESULTS; None where there is none."""
        return {name: result(self) for name, result in RESULTS.items()}

    @property
    def step(self) -> int:
        """The last step that is known of; 0 where none was done."""
        return max([0, *(r["step"] for r in self.records), *self.saved])

    @property
    def state(self) -> str:
        if self.damage:
            return DAMAGED
        measured = any(r["step"] == self.steps and "eval_loss" in r for r in self.records)
        if measured and (self.steps in self.saved or "end" in self.origin):
            return DONE  # by the same signs as `training.loop.train` takes it for done; checkpoints may be removed
        if self.training:
            return TRAINING
        return STOPPED if self.step else UNTRAINED


# Losses are in nats per token; bits per byte are those of validation.
RESULTS: dict[str, Callable[[RunFiles], Any]] = {
    "state": lambda run: run.state,
    "step": lambda run: run.step,
    "tokens": lambda run: _last(run.records, "tokens"),
    "loss": lambda run: _last(run.records, "loss"),
    "eval_loss": lambda run: _last(run.records, "eval_loss"),
    "bits_per_byte": lambda run: _last(run.records, "bits_per_byte"),
    "best_bits_per_byte": lambda run: min(_numbers(run.records, "bits_per_byte"), default=None),
    "error": lambda run: _last(run.records, "error"),
    "best_error": lambda run: min(_numbers(run.records, "error"), default=None),
    "evaluation.loss": lambda run: as_number(run.evaluation.get("loss")),
    "evaluation.bits_per_byte": lambda run: as_number(run.evaluation.get("bits_per_byte")),
    "evaluation.error": lambda run: as_number(run.evaluation.get("error")),
    "seconds": lambda run: _last(run.timing, "seconds"),
    "start": lambda run: next((s.get("start") for s in starts(run.origin)), None),
}


def find(root: Path, say: Callable[[str], None]) -> Iterator[Path]:
    """Every directory below ``root`` (which may be one) that has a config.json, in order of name.

    Links are followed, each directory is visited once, those with a leading dot are not.
    UserError where ``root`` is no directory.
    """
    if not os.path.isdir(root):
        raise UserError(f"--root: there is no directory {root}")
    visited: set[tuple[int, int]] = set()
    below = [root]
    while below:
        folder = below.pop()
        try:
            place = folder.stat()
            entries = sorted(folder.iterdir(), key=lambda p: (p.is_symlink(), p.name))
            is_run = any(p.name == CONFIG for p in entries)
            skipped = INSIDE if is_run else ()
            folders = [p for p in entries if p.name not in skipped and not p.name.startswith(".") and p.is_dir()]
        except OSError as error:
            say(f"{folder}: cannot be read: {error.strerror}")
            continue
        if (place.st_dev, place.st_ino) in visited:
            continue
        visited.add((place.st_dev, place.st_ino))
        below.extend(reversed(folders))
        if is_run:
            yield folder


def read_all(root: Path, say: Callable[[str], None]) -> list[RunFiles]:
    """Every run below ``root``. A config.json of another program is not a run; a damaged one of ours is."""
    return [run for run in map(read_run, find(root, say)) if not _foreign(run)]


def read_run(directory: Path) -> RunFiles:
    """What is there of a run. UserError only where there is no config.json at all."""
    damage: list[str] = []

    def attempt(read: Callable[..., T], *args: Any, otherwise: T) -> T:
        try:
            return read(*args)
        except UserError as error:
            damage.append(str(error).removeprefix(f"{directory}{os.sep}"))
        except OSError as error:
            name = Path(error.filename or directory).name
            damage.append(f"{name}: cannot be read: {error.strerror or error}")
        return otherwise

    if not os.path.lexists(directory / CONFIG):
        stored_config(directory)  # says that it is no run
    run = RunFiles(
        directory=directory,
        settings=attempt(_settings, directory, otherwise={}),
        origin=attempt(read_provenance, directory, otherwise={}),
        records=attempt(read, directory / METRICS, otherwise=[]),
        timing=attempt(read, directory / "timing.jsonl", otherwise=[]),
        evaluation=attempt(_evaluation, directory, otherwise={}),
        saved=attempt(saved_steps, directory / CHECKPOINTS, otherwise=[]),
        training=attempt(in_use, directory, otherwise=False),
        damage=damage,
    )
    attempt(_check_whole, run, otherwise=None)
    return run


def starts(origin: dict[str, Any]) -> list[Record]:
    """Each time that a run was started, first to last: when, where, with which code, from which step."""
    before = origin.get("earlier")
    return [s for s in [*(before if isinstance(before, list) else []), origin] if isinstance(s, dict) and s]


def _settings(directory: Path) -> dict[str, Any]:
    found = flat(stored_config(directory))
    for name, value in found.items():
        if isinstance(value, list) and any(isinstance(item, list | dict) for item in value):
            raise UserError(f"{CONFIG}: {name} is not a plain value")
    return found


def _evaluation(directory: Path) -> dict[str, Any]:
    files = [directory / name for name in EVALUATIONS]
    return next((read_object(file) for file in files if file.exists()), {})


def _check_whole(run: RunFiles) -> None:
    """UserError where settings lack what every run has, or a trained run what it cannot be used without."""
    if not run.settings:
        return  # which has been said
    if run.steps is None or run.steps < 1:
        raise UserError(f"{CONFIG}: has no number of steps in {STEPS}")
    if run.step > run.steps:
        raise UserError(f"{METRICS}: has step {run.step}, and {CONFIG} {run.steps} steps in all")
    if run.step and run.settings.get("tokenizer.kind") != "bytes" and not any(run.directory.glob("tokenizer.*")):
        raise UserError("tokenizer.model: is missing")


def _foreign(run: RunFiles) -> bool:
    """Whether a readable config.json has nothing of a run's, nor anything beside it: another program's."""
    others = (PROVENANCE, METRICS, CHECKPOINTS)
    ours = any(name.startswith("train.") for name in run.settings)
    return bool(run.settings) and not ours and not any(os.path.lexists(run.directory / name) for name in others)


def _numbers(records: list[Record], name: str) -> list[int | float]:
    return [x for r in records if (x := as_number(r.get(name))) is not None]


def _last(records: list[Record], name: str) -> int | float | None:
    return next(reversed(_numbers(records, name)), None)
