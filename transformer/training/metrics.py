"""What a run writes down: metrics.jsonl (nothing in it depends on the clock), timing.jsonl, event files."""

import contextlib
import io
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from transformer.errors import UserError
from transformer.jsons import finite, is_remote, write_whole
from transformer.parallel.hosts import is_first

METRICS = "metrics.jsonl"


class Records:
    """The records of a run, one JSON object a line. Opened after ``step`` steps, later ones are dropped.

    A run that was killed has records of steps after its last checkpoint; they will be done again.
    Of several processes only the first writes any. A file in a bucket cannot be appended to: there the whole of it is
    written on ``sync``, and there are no event files.
    """

    def __init__(self, directory: Path, step: int):
        self._directory, self._files, self._events = directory, dict[str, TextIO](), None
        if not is_first():
            return
        directory.mkdir(parents=True, exist_ok=True)
        for name in ("metrics", "timing"):
            path = self._path(name)
            kept = "".join(json.dumps(record) + "\n" for record in read(path) if record["step"] <= step)
            self._files[name] = _in_memory(kept) if is_remote(path) else _rewound(path, kept)
        self._tensorboard = directory / "tensorboard"
        if is_remote(directory):
            return
        from tensorboardX import SummaryWriter  # only those who write pay for it

        self._events = SummaryWriter(str(self._tensorboard), purge_step=step + 1 if step else None)

    def _path(self, name: str) -> Path:
        return self._directory / f"{name}.jsonl"

    def write(self, name: str, record: dict[str, Any]) -> None:
        """Append to metrics.jsonl or timing.jsonl, and to the event files."""
        if not is_first():
            return
        file = self._files[name]
        with naming(self._path(name)):
            file.write(json.dumps(finite(record)) + "\n")
            file.flush()
        if self._events is None:
            return
        with naming(self._tensorboard):
            for key, value in record.items():
                if key != "step" and isinstance(value, int | float) and math.isfinite(value):
                    self._events.add_scalar(f"{name}/{key}", value, record["step"])

    def close(self) -> None:
        self.sync()
        for name, file in self._files.items():
            with naming(self._path(name)), file:
                file.flush()
                if not isinstance(file, io.StringIO):
                    os.fsync(file.fileno())
        if self._events is not None:
            with naming(self._tensorboard):
                self._events.close()

    def sync(self) -> None:
        """Before a checkpoint is written, which a record of a step before it must not be missing behind."""
        for name, file in self._files.items():
            if isinstance(file, io.StringIO):
                write_whole(self._path(name), file.getvalue().encode())


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """An error in writing says where."""
    try:
        yield
    except OSError as error:
        raise OSError(f"{path}: cannot be written: {error.strerror or error}") from error


def read(path: Path) -> list[dict[str, Any]]:
    """The whole records of a file; a last line that was cut off by a kill is left out.

    UserError where another line is no record: it is the file of no run, or damaged.
    """
    if not path.exists():
        return []
    records = []
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], start=1):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            record = None
        if not isinstance(record, dict) or type(record.get("step")) is not int:
            raise UserError(f"{path}: line {number} is not a record of a step; remove it to go on without it")
        records.append(record)
    return records


def best_step(records: list[dict[str, Any]]) -> int | None:
    """The step of the lowest validation loss; None where nothing was measured (one that is no number never counts)."""
    measured = [(r["eval_loss"], r["step"]) for r in records if r.get("eval_loss") is not None]
    return min(measured)[1] if measured else None


def _rewound(path: Path, kept: str) -> TextIO:
    fresh = path.with_suffix(".tmp")
    with fresh.open("w", encoding="utf-8") as stream:
        stream.write(kept)
        stream.flush()
        os.fsync(stream.fileno())
    fresh.replace(path)
    return path.open("a", encoding="utf-8")


def _in_memory(kept: str) -> TextIO:
    file = io.StringIO()
    file.write(kept)
    return file
