"""Runs that were never trained, written as plain files."""

import json
from pathlib import Path
from typing import Any

from tests.runs.whole import done
from transformer.config import Experiment
from transformer.settings import leaves, override, to_dict

STEPS = 20
COMMITS = ("a" * 40, "b" * 40)


def lines(records: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


def write_run(directory: Path, step: int = STEPS, bits: tuple[float, ...] = (2.5, 2.25), **changes: Any) -> Path:
    """A run that was trained for ``step`` of 20 steps, measured every 10; ``changes`` has ``model__depth=3``."""
    asked = {"train.steps": STEPS, "tokenizer": "bytes"} | {k.replace("__", "."): v for k, v in changes.items()}
    experiment = override(Experiment(), asked)
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(to_dict(experiment)))
    (directory / "provenance.json").write_text(json.dumps(provenance(step)))
    if step:
        records: list[dict[str, Any]] = []
        for at in range(1, step + 1):
            records.append({"step": at, "tokens": 100 * at, "loss": 4.0 - at / 10})
            if at % 10 == 0:
                records.append({"step": at, "eval_loss": bits[at // 10 - 1] * 2, "bits_per_byte": bits[at // 10 - 1]})
        (directory / "metrics.jsonl").write_text(lines(records))
        (directory / "timing.jsonl").write_text(lines([{"step": at, "seconds": 2.0 * at} for at in (1, step)]))
        saved = directory / "checkpoints" / str(step)
        saved.mkdir(parents=True)
        (saved / "digests.json").write_text("{}")
        (saved / "weights").write_bytes(bytes(1000))
    return directory


def provenance(step: int) -> dict[str, Any]:
    origin: dict[str, Any] = {
        "command": ["train", "--config=my file.py"],
        "commit": COMMITS[0],
        "uncommitted": "diff\n-old\n+new",
        "python": "3.11.7",
        "versions": {"jax": "0.10.2", "flax": "0.12.8"},
        "devices": ["1 x cpu (cpu)"],
        "host": "here",
        "start": "2026-11-29T18:55:02+00:00",
        "content_hash": "c0ffee",
        "tokenizer_hash": "7ea",
        "resumed_at_step": 0,
        "earlier": [],
    }
    return origin | ({"end": "2026-11-29T19:55:02+00:00"} if step == STEPS else {})


def change(file: Path, **values: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def listed(root: Path, *flags: str) -> list[dict[str, Any]]:
    return done("runs", "list", f"--root={root}", *flags)["runs"]


def names(root: Path, *flags: str) -> list[str]:
    return [str(Path(entry["run"]).relative_to(root)) for entry in listed(root, *flags)]


BASE = {"train.steps": STEPS, "tokenizer": "bytes"}


def json_leaves(experiment: Experiment) -> dict[str, Any]:
    return {name: list(x) if isinstance(x, tuple) else x for name, x in leaves(experiment).items()}
