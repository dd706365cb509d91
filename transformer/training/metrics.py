"""What a run writes down: metrics.jsonl (nothing in it depends on the clock), timing.jsonl, event files."""

import json
import os
from pathlib import Path
from typing import Any

from tensorboardX import SummaryWriter

from transformer.jsons import finite


class Records:
    """The records of a run, one JSON object a line. Opened after ``step`` steps, later ones are dropped.

    A run that was killed has records of steps after its last checkpoint; they will be done again.
    """

    def __init__(self, directory: Path, step: int):
        directory.mkdir(parents=True, exist_ok=True)
        self._files = {}
        for name in ("metrics", "timing"):
            path = directory / f"{name}.jsonl"
            _rewind(path, step)
            self._files[name] = path.open("a", encoding="utf-8")
        self._events = SummaryWriter(str(directory / "tensorboard"), purge_step=step + 1 if step else None)

    def write(self, name: str, record: dict[str, Any]) -> None:
        """Append to metrics.jsonl or timing.jsonl, and to the event files."""
        file = self._files[name]
        file.write(json.dumps(finite(record)) + "\n")
        file.flush()
        for key, value in record.items():
            if key != "step" and isinstance(value, int | float):
                self._events.add_scalar(f"{name}/{key}", value, record["step"])

    def close(self) -> None:
        for file in self._files.values():
            os.fsync(file.fileno())
            file.close()
        self._events.close()


def read(path: Path) -> list[dict[str, Any]]:
    """The whole records of a file; a last line that was cut off by a kill is left out."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def _rewind(path: Path, step: int) -> None:
    kept = [record for record in read(path) if record["step"] <= step]
    fresh = path.with_suffix(".tmp")
    fresh.write_text("".join(json.dumps(record) + "\n" for record in kept), encoding="utf-8")
    fresh.replace(path)
