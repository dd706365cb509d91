"""The files of a run's directory, as far as they can be read without JAX. docs/architecture.md lists them all."""

import contextlib
import fcntl
import importlib.util
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

from transformer.errors import UserError
from transformer.jsons import is_remote, read_object

CONFIG, PROVENANCE, CHECKPOINTS = "config.json", "provenance.json", "checkpoints"
STUDY = "study.json"  # what tells a study's directory
DIGESTS = "digests.json"  # of a checkpoint: its presence says that the checkpoint is finished
PATIENCE = 0.2  # seconds
REMOTE = {
    "gs://": "gcsfs",
    "s3://": "s3fs",
}  # what tensorstore, under Orbax, and epath both know, with what fsspec needs


def where(flag: str, text: str) -> Path:
    """A path of this machine, with ~ for the home directory, or one of a bucket (gs://...), which is used the same way.

    UserError for other URLs.
    """
    if "://" not in text:
        return Path(text).expanduser()
    if not text.startswith(tuple(REMOTE)):
        raise UserError(f"{flag}: {text} is not a directory of this machine or a URL of {' or '.join(REMOTE)}")
    package = REMOTE[text[:5]]
    if importlib.util.find_spec(package) is None:
        raise UserError(f"{flag}: {text} needs the package {package}, which is not installed")
    from etils import epath

    return cast(Path, epath.Path(text))


def stored_config(directory: Path) -> dict[str, Any]:
    """config.json as it is written, with no name or value checked. UserError where the directory is no run's."""
    file = directory / CONFIG
    if not file.is_file():
        study = "; it is a study's, which `report` shows" if (directory / STUDY).is_file() else ""
        raise UserError(f"{directory}: is not a run's directory (it has no {CONFIG}{study})")
    return read_object(file)


def check_writable(directory: Path) -> None:
    """UserError where no file can be made in a directory that is there: better before the work than after it."""
    if not is_remote(directory) and directory.is_dir() and not os.access(directory, os.W_OK):
        raise UserError(f"{directory}: cannot be written, and what is asked for would be written there")


def read_provenance(directory: Path) -> dict[str, Any]:
    """What provenance.json says; empty where there is none."""
    file = directory / PROVENANCE
    return read_object(file) if file.is_file() else {}


def saved_steps(directory: Path) -> list[int]:
    """The steps of the finished checkpoints in ``directory``, ascending."""
    found = directory.iterdir() if directory.is_dir() else ()
    return sorted(int(p.name) for p in found if p.name.isdecimal() and (p / DIGESTS).is_file())


@contextlib.contextmanager
def alone(directory: Path, shared: bool = False) -> Iterator[None]:
    """Inside, no other process trains in ``directory``, but for others with ``shared`` where it is set. UserError where
    one does; a kill leaves no lock behind.

    A bucket has no locks: there it is up to the user.
    """
    if is_remote(directory):
        yield
        return
    handle = os.open(directory, os.O_RDONLY)
    until = time.monotonic() + PATIENCE  # `in_use` holds the lock for a moment when it looks
    try:
        while True:
            try:
                fcntl.flock(handle, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > until:
                    raise UserError(
                        f"--workdir: another process trains in {directory}; choose another directory"
                    ) from None
                time.sleep(PATIENCE / 20)
            except OSError as error:
                raise UserError(f"--workdir: {directory} cannot be locked: {error.strerror}") from error
        yield
    finally:
        os.close(handle)


@contextlib.contextmanager
def in_turn(file: Path) -> Iterator[None]:
    """Inside, no other process is in here with the same file, which must be on this machine. UserError where it cannot
    be made."""
    try:
        handle = file.open("a")
    except OSError as error:
        raise UserError(f"--workdir: cannot write to {file}: {error.strerror}") from error
    with handle:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def in_use(directory: Path) -> bool:
    """Whether a process of this machine trains in ``directory`` now; False where that cannot be known."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a file system without locks
        return False
    finally:
        os.close(handle)
    return False
