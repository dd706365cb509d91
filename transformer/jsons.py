"""JSON as it is written here: whole or not at all, and without the infinities that JSON does not have."""

import json
import math
from pathlib import Path
from typing import Any

from transformer.errors import UserError
from transformer.parallel.hosts import is_first


def finite(value: Any) -> Any:
    """``value`` with null for every infinity and NaN."""
    if isinstance(value, dict):
        return {k: finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_json(path: Path) -> Any:
    """What the JSON in a file says. UserError where it holds anything else."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: is not JSON: {error}") from error


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file, finite. UserError where it holds anything else."""
    data = finite(read_json(path))
    if not isinstance(data, dict):
        raise UserError(f"{path}: is not a JSON object")
    return data


def write_json(path: Path, data: Any) -> None:
    """Written whole or not at all, by the first process."""
    if is_first():
        write_whole(path, (json.dumps(finite(data), indent=2, allow_nan=False) + "\n").encode())


def write_whole(path: Path, data: bytes) -> None:
    """Written whole or not at all."""
    if is_remote(path):
        path.write_bytes(data)  # an object appears when all of it is there
        return
    fresh = path.with_name(path.name + ".tmp")
    fresh.write_bytes(data)
    fresh.replace(path)


def is_remote(path: Path) -> bool:
    """Whether this is a path behind a URL (see `files.where`)."""
    return "://" in str(path)
