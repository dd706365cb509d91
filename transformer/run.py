"""A run on disk: one directory, everything in it readable. See docs/architecture.md for the files."""

import contextlib
import dataclasses
import math
import os
import platform
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

from transformer.checkout import git
from transformer.config import Experiment
from transformer.data import tokenizer as tokenizers
from transformer.data.tasks.task import Task
from transformer.data.tokenizer import Tokenizer
from transformer.errors import UserError
from transformer.files import CHECKPOINTS, CONFIG, read_provenance, stored_config
from transformer.jsons import write_json
from transformer.parallel.hosts import count
from transformer.parallel.mesh import Mesh, sizes
from transformer.settings import differing, from_dict, leaves, to_dict
from transformer.training.checkpoint import restore_params

LIBRARIES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "sentencepiece")


@dataclasses.dataclass(frozen=True)
class Run:
    """What a run's directory says: its settings and its tokenizer. Weights are read when asked for."""

    directory: Path
    experiment: Experiment
    tokenizer: Tokenizer

    def of_text(self, flag: str = "--run") -> "Run":
        """Itself. UserError, about what ``flag`` asks for, where it was trained on a synthetic task."""
        if isinstance(self.experiment.data.source, Task):
            raise UserError(
                f"{flag}: {self.directory} learned a synthetic task: it answers, and no text is read or continued"
            )
        return self

    def begin(self, text: str) -> list[int]:
        """The ids of a prompt behind the start token, if these weights have one."""
        return [*self.tokenizer.starts, *self.tokenizer.encode(text).tolist()]

    def on_one_device(self) -> "Run":
        """The same run with a mesh of ones, for sampling and measuring where it was not trained."""
        return dataclasses.replace(self, experiment=dataclasses.replace(self.experiment, mesh=Mesh()))

    def on_these_devices(self) -> "Run":
        """For measuring: as `on_one_device`; on several processes as trained, or every device with its own rows."""
        if count() == 1:
            return self.on_one_device()
        devices = len(jax.devices())
        mesh = self.experiment.mesh
        mesh = mesh if math.prod(sizes(mesh).values()) == devices else Mesh(data=devices)
        return dataclasses.replace(self, experiment=dataclasses.replace(self.experiment, mesh=mesh))

    def params(self, which: str = "newest", alone: bool = False) -> tuple[Any, int]:
        """The weights of a checkpoint ("newest", "best" or a step) on the mesh that is set, and its step.

        ``alone``: this process reads them, for devices of its own.
        """
        return restore_params(self.directory / CHECKPOINTS, self.experiment, which, alone)


def open_run(directory: Path) -> Run:
    """Read a run. UserError where the directory is none."""
    experiment = read_config(directory)
    return Run(directory, experiment, tokenizers.load(experiment.tokenizer, directory))


def read_config(directory: Path) -> Experiment:
    """The run's settings, every name and value checked. UserError where the directory is no run's."""
    stored = stored_config(directory)
    try:
        return from_dict(Experiment, stored)
    except UserError as error:
        raise UserError(f"{directory / CONFIG}: {error}") from error


def is_ours(directory: Path, experiment: Experiment) -> bool:
    """Whether ``directory`` holds this experiment's run; False where it is free. Nothing is written.

    UserError where it holds a run of other settings (the differences are listed) or other files. Only the mesh may be
    another one than it was.
    """
    if not (directory / CONFIG).is_file():
        if directory.exists() and not directory.is_dir():
            raise UserError(f"--workdir: {directory} is a file")
        if directory.is_dir() and any(directory.iterdir()):
            raise UserError(f"--workdir: {directory} is not empty and holds no run; choose another directory")
        return False
    differences = [
        f"{name} was {old!r}, now {new!r}"
        for name, (old, new) in differing(leaves(read_config(directory)), leaves(experiment)).items()
        if not name.startswith("mesh.")
    ]
    if differences:
        raise UserError(
            f"--workdir: {directory} holds a run of another configuration: {'; '.join(differences)}; "
            "choose another directory, or the same settings to go on"
        )
    return True


def make(directory: Path) -> None:
    """Make a run's directory where there is none. UserError where that cannot be done."""
    with writing(directory):
        directory.mkdir(parents=True, exist_ok=True)


def claim(directory: Path, experiment: Experiment) -> None:
    """Make a free ``directory`` this experiment's, in `files.alone`. UserError where it cannot be written to, or was
    taken since it was found free."""
    if (directory / CONFIG).is_file():
        raise UserError(f"--workdir: another process has begun a run in {directory}; choose another directory")
    with writing(directory):
        write_json(directory / CONFIG, to_dict(experiment))


@contextlib.contextmanager
def writing(directory: Path) -> Iterator[None]:
    """UserError for what the system refuses."""
    try:
        yield
    except OSError as error:
        raise UserError(f"--workdir: cannot write to {directory}: {error.strerror}") from error


def check_text(directory: Path, content_hash: str, tokenizer_hash: str) -> None:
    """UserError where the run in ``directory`` was trained on other text, or with another tokenizer."""
    known = read_provenance(directory)
    for what, found in (("content_hash", content_hash), ("tokenizer_hash", tokenizer_hash)):
        if known.get(what, found) != found:
            raise UserError(
                f"{directory}: was trained on other text than data.source holds now: {what} was {known[what]}, "
                f"is {found}; put the text back, or train in another directory"
            )


def provenance(argv: list[str], **more: Any) -> dict[str, Any]:
    """Where a result comes from: command, code, versions, devices, host, time."""
    devices = jax.devices()
    return {
        "command": argv,
        "commit": git("rev-parse", "HEAD"),
        "uncommitted": git("diff", "HEAD"),
        "python": sys.version.split()[0],
        "versions": {name: metadata.version(name) for name in LIBRARIES},
        "processes": count(),
        "devices": [f"{len(devices)} x {devices[0].device_kind} ({devices[0].platform})"],
        "host": platform.node(),
        "machine": f"{platform.machine()}, {platform.system()} {platform.release()}",
        "cores": _cores(),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "start": now(),
    } | more


def check_machine(directory: Path, here: dict[str, Any], say: Callable[[str], None]) -> None:
    """Say what differs from the run's last start in what the bits of its results depend on."""
    before = read_provenance(directory)
    differ = [
        f"{name} was {before[name]!r}, is {here[name]!r}"
        for name in ("mesh", "processes", "devices", "cores", "machine", "xla_flags", "versions")
        if name in before and before[name] != here[name]
    ]
    if differ:
        say(f"{directory}: what follows may differ in the last bits from a run never stopped: {'; '.join(differ)}")


def earlier(directory: Path) -> list[dict[str, Any]]:
    """The starts of a run before this one, oldest first: when, where, with which code, from which step."""
    last = read_provenance(directory)
    if not last:
        return []
    kept = ("start", "end", "resumed_at_step", "host", "commit", "versions")
    return [*last.get("earlier", []), {name: last[name] for name in kept if name in last}]


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
