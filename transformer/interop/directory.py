"""A directory that is there whole or not at all: made beside, and renamed at the end."""

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

from transformer.errors import UserError

UNFINISHED = ".unfinished"


@contextlib.contextmanager
def whole(flag: str, target: Path) -> Iterator[Path]:
    """Inside, what is made at the path given; afterwards that is ``target``, or gone where something went wrong.

    UserError where the target holds anything, or cannot be written.
    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UserError(f"{flag}: {target} is not empty; choose another directory")
    fresh = target.absolute().with_name(target.name + UNFINISHED)
    shutil.rmtree(fresh, ignore_errors=True)  # left by a kill
    try:
        yield fresh
        fresh.rename(target)
    except OSError as error:
        raise UserError(f"{flag}: {target} cannot be written: {error.strerror or error}") from error
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
