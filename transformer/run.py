"""A run on disk: one directory, everything in it readable. See docs/architecture.md for the files."""

import contextlib
import dataclasses
import fcntl
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

from transformer.config import Experiment
from transformer.data import tokenizer as tokenizers
from transformer.data.tokenizer import Tokenizer
from transformer.errors import UserError
from transformer.jsons import write_json
from transformer.parallel.mesh import Mesh
from transformer.settings import from_dict, leaves, to_dict
from transformer.training.checkpoint import restore_params

CONFIG, PROVENANCE, CHECKPOINTS = "config.json", "provenance.json", "checkpoints"
LIBRARIES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "sentencepiece")


@dataclasses.dataclass(frozen=True)
class Run:
    """What a run's directory says: its settings and its tokenizer. Weights are read when asked for."""

    directory: Path
    experiment: Experiment
    tokenizer: Tokenizer

    def on_one_device(self) -> "Run":
        """The same run with a mesh of ones, for sampling and measuring where it was not trained."""
        return dataclasses.replace(self, experiment=dataclasses.replace(self.experiment, mesh=Mesh()))

    def params(self, which: str = "newest") -> tuple[Any, int]:
        """The weights of a checkpoint ("newest", "best" or a step) on the mesh that is set, and its step."""
        return restore_params(self.directory / CHECKPOINTS, self.experiment, which)


def open_run(directory: Path) -> Run:
    """Read a run. UserError where the directory is none."""
    experiment = read_config(directory)
    return Run(directory, experiment, tokenizers.load(experiment.tokenizer, directory))


def read_config(directory: Path) -> Experiment:
    file = directory / CONFIG
    if not file.is_file():
        raise UserError(f"{directory}: is not a run's directory (it has no {CONFIG})")
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{file}: is not JSON: {error}") from error
    return from_dict(Experiment, data)


def is_ours(directory: Path, experiment: Experiment) -> bool:
    """Whether ``directory`` holds this experiment's run; False where it is free. Nothing is written.

    UserError where it holds a run of other settings (the differences are listed) or other files.
    """
    if not (directory / CONFIG).is_file():
        if directory.exists() and not directory.is_dir():
            raise UserError(f"--workdir: {directory} is a file")
        if directory.is_dir() and any(directory.iterdir()):
            raise UserError(f"--workdir: {directory} is not empty and holds no run; choose another directory")
        return False
    old, new = leaves(read_config(directory)), leaves(experiment)
    differences = [
        f"{name} was {old.get(name, 'absent')!r}, now {new.get(name, 'absent')!r}"
        for name in sorted(old.keys() | new.keys())
        if old.get(name) != new.get(name)
    ]
    if differences:
        raise UserError(
            f"--workdir: {directory} holds a run of another configuration: {'; '.join(differences)}; "
            "choose another directory, or the same settings to go on"
        )
    return True


def claim(directory: Path, experiment: Experiment) -> None:
    """Make a free ``directory`` this experiment's. UserError where it cannot be written to."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        write_json(directory / CONFIG, to_dict(experiment))
    except OSError as error:
        raise UserError(f"--workdir: cannot write to {directory}: {error.strerror}") from error


@contextlib.contextmanager
def alone(directory: Path) -> Iterator[None]:
    """Inside, no other process trains in ``directory``. UserError where one does; a kill leaves no lock behind."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"--workdir: another process trains in {directory}; choose another directory") from None
        except OSError as error:
            raise UserError(f"--workdir: {directory} cannot be locked: {error.strerror}") from error
        yield
    finally:
        os.close(handle)


def check_text(directory: Path, content_hash: str, tokenizer_hash: str) -> None:
    """UserError where the run in ``directory`` was trained on other text, or with another tokenizer."""
    known = read_provenance(directory)
    for what, found in (("content_hash", content_hash), ("tokenizer_hash", tokenizer_hash)):
        if known.get(what, found) != found:
            raise UserError(
                f"{directory}: was trained on other text than data.source holds now: {what} was {known[what]}, "
                f"is {found}; put the text back, or train in another directory"
            )


def read_provenance(directory: Path) -> dict[str, Any]:
    """What provenance.json says; empty where there is none."""
    file = directory / PROVENANCE
    try:
        return dict(json.loads(file.read_text(encoding="utf-8"))) if file.is_file() else {}
    except ValueError as error:
        raise UserError(f"{file}: is not JSON: {error}") from error


def provenance(argv: list[str], **more: Any) -> dict[str, Any]:
    """Where a result comes from: command, code, versions, devices, host, time."""
    devices = jax.devices()
    return {
        "command": argv,
        "commit": _git("rev-parse", "HEAD"),
        "uncommitted": _git("diff", "HEAD"),
        "python": sys.version.split()[0],
        "versions": {name: metadata.version(name) for name in LIBRARIES},
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
        for name in ("devices", "cores", "machine", "xla_flags", "versions")
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


def _git(*words: str) -> str | None:
    """What git says about this project's own checkout; None where it is not one."""
    here = Path(__file__).parent
    try:
        top = subprocess.run(
            ["git", *words], cwd=here, capture_output=True, text=True, errors="replace", timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return top.stdout.strip()
