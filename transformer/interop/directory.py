"""A directory that is there whole or not at all: made beside, and renamed at the end."""

import contextlib
import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from transformer.errors import UserError

UNFINISHED = ".unfinished"


@contextlib.contextmanager
def whole(flag: str, target: Path) -> Iterator[Path]:
    """Inside, what is made at the path given; afterwards that is ``target``, or gone where something went wrong.

    UserError where the target holds anything, cannot be written, or is being written by another process.
    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UserError(f"{flag}: {target} is not empty; choose another directory")
    place = target.absolute()
    fresh, above = place.with_name(place.name + UNFINISHED), [p for p in place.parents if not p.exists()]
    try:
        with _held(flag, fresh):
            try:
                yield fresh
                fresh.rename(place)
            finally:
                shutil.rmtree(fresh, ignore_errors=True)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):  # nothing that the user wrote is wrong
            raise
        raise UserError(f"{flag}: {target} cannot be written: {error.strerror or error}") from error
    finally:
        with contextlib.suppress(OSError):  # where it was made, it is not empty
            for parent in above:
                parent.rmdir()


@contextlib.contextmanager
def _held(flag: str, fresh: Path) -> Iterator[None]:
    """Makes the directory, empty, and keeps other processes from doing so. What a killed one left is deleted."""
    if fresh.is_symlink():
        raise UserError(f"{flag}: {fresh} is a link to another place and would be emptied; remove it")
    fresh.mkdir(parents=True, exist_ok=True)
    directory = os.open(fresh, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        try:
            fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
            mine = fresh.exists() and os.path.samestat(os.fstat(directory), fresh.stat())
        except BlockingIOError:
            mine = False
        if not mine:  # or it became the target a moment ago
            raise UserError(f"{flag}: {fresh} is being written by another process; wait for it, or choose another")
        for left in fresh.iterdir():
            shutil.rmtree(left) if left.is_dir() and not left.is_symlink() else left.unlink()
        yield
    finally:
        os.close(directory)
