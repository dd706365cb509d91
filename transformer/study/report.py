"""A study's report: one self-contained page for two minutes of reading, and its figures and numbers as files.

    report.html   the page
    figures/      each figure of it as SVG and PDF
    *.csv         see directory.py

The same directory gives the same bytes.
"""

import hashlib
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from transformer.analysis.cost import FLOPS_FORMULA
from transformer.jsons import write_whole
from transformer.pages import drawn, inline, write_page
from transformer.study import figures
from transformer.study.answered import answered
from transformer.study.directory import Run, costs, read_study, write_tables
from transformer.study.equal import HELD, TOLERANCE
from transformer.study.fits import of_study
from transformer.study.power import POWER, SEEDS_CAP
from transformer.study.ranking import in_words, ranking
from transformer.study.study import AGAIN
from transformer.study.words import digits, half, probability, si

REPORT = "report.html"
ORIGINS = ("command", "commit", "python", "versions", "devices", "host", "machine", "cores", "xla_flags")
HASHES = {"content_hash": "text", "tokenizer_hash": "tokenizer"}


def write_report(directory: Path) -> Path:
    """Write the page, the figures and the tables; returns the page's path. UserError where no run has finished."""
    results, runs = read_study(directory)
    answers, law, ranks = answered(results, runs), of_study(results), ranking(results, runs)
    pictures: dict[str, Figure | None] = {
        "differences": figures.differences(results) if len(results["arms"]) > 1 else None,
        "curves_tokens": figures.curves(results, runs, "tokens"),
        "curves_flops": figures.curves(results, runs, "flops"),
        "curves_seconds": figures.curves(results, runs, "seconds"),
        "learning_rates": figures.learning_rates(results),
        "answers": figures.answers(answers) if answers else None,
        "law": figures.law(results, law) if law and "fit" in law else None,
    }
    folder = directory / "figures"
    folder.mkdir(exist_ok=True)
    inlined: dict[str, str] = {}
    for name, figure in pictures.items():
        if figure is not None:
            svg = drawn(figure)
            write_whole(folder / f"{name}.svg", svg)
            write_whole(folder / f"{name}.pdf", drawn(figure, "pdf"))
            inlined[name] = inline(svg, f"{name}-")
    label = figures.LABELS[results["metric"]]
    tables = write_tables(directory, results, runs)
    compared = [arm for arm in results["arms"] if "comparison" in arm]
    again = next((arm for arm in compared if arm["name"] == AGAIN), None)
    done, found = sum(run.result is not None for run in runs), origins(runs)
    return write_page(
        directory / REPORT,
        "study.html",
        name=directory.resolve().name,
        results=results,
        label=label,
        done=done,
        wanted=len(runs),
        counts={v: sum(arm["comparison"]["verdict"] == v for arm in compared) for v in figures.VERDICTS},
        confidence=compared[0]["comparison"]["confidence"] if compared else None,
        power=POWER,
        cap=SEEDS_CAP,
        rows=[verdict(arm, results["seeds"]) for arm in results["arms"]],
        troubles=list(troubles(results, runs)),
        again=again if again and again["comparison"]["verdict"] != "not resolved" else None,
        figures=inlined,
        failed=any(run.state == "failed" for run in runs),
        costs=costs(results, runs),
        formula=FLOPS_FORMULA,
        changes=[changes(arm, results) for arm in results["arms"][1:]],
        held=HELD[results["equal"]][0],
        edges=[arm for arm in results["arms"] if arm["learning_rate"].get("at_the_edge")],
        samples=samples(results, runs),
        origins=found,
        differ=[name for name, values in found.items() if len(values) > 1],
        tables=tables,
        answers=answers,
        ranks=ranks,
        ranks_in_words=in_words(ranks) if ranks else "",
        law=law,
        law_in_words=law["fit"].in_words(label, law["name"]).splitlines() if law and "fit" in law else [],
        si=si,
    )


def verdict(arm: Mapping[str, Any], seeds: Sequence[int]) -> dict[str, Any]:
    """An arm's row of the first table, as text; an empty one where there is nothing to say."""
    compared = arm.get("comparison")
    row = {"name": arm["name"], "mean": digits(arm["mean"], arm["sd"]), "sd": digits(arm["sd"], arm["sd"])}
    if compared is None:
        return {**row, "verdict": None}
    low, high = (digits(compared[end], half(compared), "+") for end in ("low", "high"))
    needed = None
    if compared["verdict"] == "not resolved" and compared["smallest_effect"] is not None:
        needed = f"> {SEEDS_CAP}" if compared["seeds_needed"] is None else str(compared["seeds_needed"])
    return {
        **row,
        "verdict": compared["verdict"],
        "reason": compared["reason"],
        "difference": digits(compared["difference"], half(compared), "+"),
        "interval": f"{low} to {high}" if low else "",
        "p": probability(compared["p_holm"]),
        "sign_flip": probability(compared["sign_flip_p"]),
        "least": probability(compared["least_sign_flip_p"]),
        "smallest": digits(compared["smallest_effect"], compared["smallest_effect"]),
        "needed": needed if compared["verdict"] == "not resolved" else "settled",
        "used": f"{len(compared['seeds'])} of {len(seeds)}",
        "whole": len(compared["seeds"]) == len(seeds),
    }


def troubles(results: Mapping[str, Any], runs: Iterable[Run]) -> Iterable[tuple[str, str]]:
    """Every run that gave no number: whose it is, and why it gave none."""
    missing = []
    for run in runs:
        if run.result is None:
            missing.append(run)
        elif "failed" in run.result:
            yield names([run]), f"failed: {run.result['failed']}"
        elif run.result.get(results["metric"]) is None:
            yield names([run]), "ended without a finite value"
    if missing:
        yield names(missing), "no result yet"


def names(runs: Iterable[Run]) -> str:
    """Whose runs these are: "wide, seeds 0, 1; deep, seed 0"."""
    seeds: dict[str, list[str]] = {}
    for run in runs:
        seeds.setdefault(run.arm, []).append(str(run.seed))
    return "; ".join(f"{arm}, seed{'s' * (len(own) > 1)} {', '.join(own)}" for arm, own in seeds.items())


def changes(arm: Mapping[str, Any], results: Mapping[str, Any]) -> dict[str, Any]:
    """What an arm declares, what was solved for, how far what is held equal is off, and what else differs."""
    base, held = results["arms"][0]["quantities"], HELD[results["equal"]][0]
    off = {name: value / base[name] - 1 for name, value in arm["quantities"].items()}
    return {
        "name": arm["name"],
        "changes": arm["changes"],
        "solved": arm["solved"],
        "miss": off[held],
        "else": {n.replace("_", " "): value for n, value in off.items() if n != held and abs(value) > TOLERANCE},
        "learning_rate": arm["learning_rate"]["chosen"] if results["learning_rates"] else None,
    }


def samples(results: Mapping[str, Any], runs: Sequence[Run]) -> list[tuple[Run, list[dict[str, Any]]]]:
    """Of each arm's first seed."""
    first = results["seeds"][0]
    return [(run, run.samples) for run in runs if run.seed == first and run.samples]


def origins(runs: Iterable[Run]) -> dict[str, list[tuple[str, str]]]:
    """Where the runs come from: of each property its values, each with the runs that it is of ("" where it is all)."""
    found: dict[str, dict[str, list[Run]]] = {}
    started = [run for run in runs if run.origin]
    for run in started:
        origin = run.origin
        values = {name: _said(origin.get(name)) for name in ORIGINS}
        values["command"] = shlex.join(["python", "-m", "transformer", *map(str, origin.get("command") or [])])
        diff = origin.get("uncommitted")
        values["uncommitted changes"] = f"sha256 {hashlib.sha256(diff.encode()).hexdigest()[:16]}" if diff else "none"
        values |= {f"hash of the {what}": _said(origin.get(name)) for name, what in HASHES.items()}
        for name, value in values.items():
            found.setdefault(name, {}).setdefault(value, []).append(run)
    times = [time for run in started for time in (run.origin.get("start"), run.origin.get("end")) if time]
    said = {
        name: [(value, "" if len(values) == 1 else names(whose)) for value, whose in values.items()]
        for name, values in found.items()
    }
    return said | ({"from, to": [(f"{min(times)}, {max(times)}", "")]} if times else {})


def _said(value: Any) -> str:
    """A value of provenance.json in words."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {version}" for name, version in value.items())
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return "unknown" if value is None else str(value) if value != "" else "none"
