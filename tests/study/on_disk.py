"""A study's directory as the runner leaves it, written file by file."""

import json
from pathlib import Path
from typing import Any

from tests.page import EVIL
from transformer.study.study import folder

ODD = f"漢\x07$x^2$ {EVIL}"  # a name that no font has, that is no text, mathematics, and markup
RATES = [0.001, 0.003, 0.01]
QUANTITIES = {"steps": 40, "tokens": 1280, "bytes": 5000.5, "parameters": 1000, "block_parameters": 600, "flops": 7e8}
# The letters of the comparison that are checked where they are shown.
COMPARED: dict[str, Any] = {
    **{"arms": 2, "seeds": [0, 1, 2], "left_out": [], "difference": -0.1234567, "sd": 0.04, "low": -0.2234567},
    **{"high": -0.0234567, "confidence": 0.95, "p": 0.004, "p_holm": 0.0081, "verdict": "better", "reason": None},
    **{"sign_flip_p": 0.31, "least_sign_flip_p": 0.26, "smallest_effect": 0.1777, "seeds_needed": 77},
}
NOTHING = dict.fromkeys([name for name, value in COMPARED.items() if isinstance(value, float) and name != "confidence"])


def compared(**changed: Any) -> dict[str, Any]:
    return {**COMPARED, **changed}


def arm(name: str, **changed: Any) -> dict[str, Any]:
    """A row of results.json."""
    quantities = QUANTITIES | changed.pop("quantities", {})
    row = {"name": name, "changes": {}, "solved": {}, "quantities": quantities, "mean": 3.0123456, "sd": 0.0342}
    return {**row, "tables": 0.37, "learning_rate": {"chosen": 0.003}, **changed}


def metric(name: str, seed: int) -> float:
    """Of a finished run, in the last step."""
    return 3 + 0.01 * seed + 0.1 * len(name) / 100


def curve(name: str, seed: int) -> dict[int, float]:
    return {step: metric(name, seed) + 2 * (40 - step) / 40 for step in (10, 20, 30, 40)}


def lines(records: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


def written(
    directory: Path,
    arms: list[dict[str, Any]],
    seeds: tuple[int, ...] = (0, 1, 2),
    *,
    failed: dict[tuple[str, int], str] | None = None,
    missing: tuple[tuple[str, int], ...] = (),
    **changed: Any,
) -> Path:
    """A study's directory. A failed run stops after step 20."""
    for row in arms:
        row["seeds"] = {}
        for seed in seeds:
            place = directory / "arms" / folder(row["name"]) / f"seed_{seed}"
            if (row["name"], seed) in missing:
                row["seeds"][str(seed)] = None
                continue
            place.mkdir(parents=True)
            values = curve(row["name"], seed)
            result: dict[str, Any] = {"config": f"{len(row['name']):03}{seed}", "content_hash": "c" * 64}
            result["tokenizer_hash"] = "d" * 64
            if reason := (failed or {}).get((row["name"], seed)):
                values = {step: value for step, value in values.items() if step <= 20}
                result["failed"] = reason
            else:
                result |= {"step": 40, "bits_per_byte": values[40], "loss": values[40] / 2, "perplexity": 9.5}
            measured = [
                {"step": s, "eval_loss": v / 2, "perplexity": 9.5, "bits_per_byte": v, "accuracy": None}
                for s, v in values.items()
            ]
            (place / "metrics.jsonl").write_text(lines([{"step": 1, "tokens": 30, "loss": 5.5}, *measured]))
            timing = [
                {
                    "step": s,
                    "seconds": (s - 1) * (1 + seed),
                    "tokens_per_second": 100.0 * s,
                    "mfu": 0.1,
                    "memory": 5 * s,
                }
                for s in (20, 40)
            ]
            (place / "timing.jsonl").write_text(lines(timing))
            origin = {"command": ["study", EVIL], "commit": "abc", "uncommitted": "", "versions": {"jax": "1.2"}}
            origin |= {"start": "2026-01-01T00:00:00+00:00", "host": EVIL, "xla_flags": ""}
            origin |= {"end": f"2026-01-01T00:0{1 + seed}:00+00:00", "content_hash": "c" * 64}
            (place / "provenance.json").write_text(json.dumps(origin))
            (place / "result.json").write_text(json.dumps(result))
            (place / "samples.json").write_text(json.dumps([{"prompt": EVIL, "text": f"{EVIL} {seed}", "step": 40}]))
            row["seeds"][str(seed)] = result
    whole = {"question": f"Which is best? {EVIL}", "metric": "bits_per_byte", "better": "less", "seeds": list(seeds)}
    whole |= {"equal": "steps", "accept": [], "learning_rates": [], "arms": arms, **changed}
    (directory / "study.json").write_text("{}")
    (directory / "results.json").write_text(json.dumps(whole))
    return directory


def rated(chosen: float, edge: bool, *values: float | None) -> dict[str, Any]:
    found = {f"{rate:g}": value for rate, value in zip(RATES, values, strict=True)}
    return {"chosen": chosen, "at_the_edge": edge, "found": found}
