"""A run's report: one self-contained page that opens from disk: curve, measurement, samples and the bill."""

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from transformer import run as runs
from transformer.analysis import ablation_figure as ablations
from transformer.analysis.ablation import ABLATION
from transformer.analysis.cost import cost
from transformer.analysis.measure import EVALUATION
from transformer.config import is_text
from transformer.errors import UserError
from transformer.files import read_provenance
from transformer.generation.sample import SAMPLES
from transformer.jsons import read_json
from transformer.pages import drawn, inline, write_page
from transformer.settings import leaves
from transformer.training.metrics import read

REPORT = "report.html"


def write_report(directory: Path) -> Path:
    """Write ``report.html`` from what the run's directory holds, and return its path. UserError without records."""
    experiment = runs.read_config(directory)
    records = read(directory / "metrics.jsonl")
    trained = [r for r in records if "loss" in r]
    evaluation, ablation = _json(directory / EVALUATION), _json(directory / ABLATION)
    if not trained and not evaluation:
        raise UserError(f"{directory}: has no records yet, so there is nothing to report")
    timing = read(directory / "timing.jsonl")
    return write_page(
        directory / REPORT,
        "run.html",
        name=directory.resolve().name,
        hash=experiment.name,
        curve=curve(records, "token" if is_text(experiment) else "answer") if trained else None,
        last=trained[-1] if trained else evaluation,
        steps=experiment.train.steps,
        evaluation=evaluation,
        answers=answers(evaluation) if evaluation and "by_difficulty" in evaluation else None,
        ablation=ablation
        and {
            "figure": inline(drawn(ablations.figure(ablation)), "ablation-"),
            "changes": [ablations.HEADINGS, *ablations.cells(ablation)],
            "blocks": [ablations.BLOCK_HEADINGS, *ablations.block_cells(ablation)],
            "found": ablation,
        },
        samples=_json(directory / SAMPLES) or [],
        bill=cost(experiment),
        model=experiment.model,
        timing=middle(timing),
        settings=leaves(experiment),
        origin=read_provenance(directory),
    )


def curve(records: list[dict[str, Any]], of: str) -> str:
    """Loss (per ``of``) of training and validation over steps, as SVG text, in the page's colours."""
    figure = Figure(figsize=(8, 3.6), layout="constrained")
    axes = figure.subplots()
    trained = [(r["step"], r["loss"]) for r in records if r.get("loss") is not None]
    measured = [(r["step"], r["eval_loss"]) for r in records if r.get("eval_loss") is not None]
    axes.plot(
        *(zip(*trained, strict=True) if trained else ((), ())),
        color="#7a9cc6",
        linewidth=1.2,
        label="training",
        gid="training",
    )
    if measured:
        axes.plot(*zip(*measured, strict=True), color="#c1440e", marker="o", markersize=4, label="validation")
    axes.set_xlabel("step")
    axes.set_ylabel(f"loss, nats per {of}")
    axes.legend(frameon=False)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.grid(alpha=0.25)
    return inline(drawn(figure))


def answers(evaluation: dict[str, Any]) -> str:
    """A task's error by difficulty and by position, beside chance, as SVG text."""
    figure = Figure(figsize=(8, 2.8), layout="constrained")
    for axes, (name, rows) in zip(
        figure.subplots(1, 2, sharey=True),
        ((evaluation["difficulty"], evaluation["by_difficulty"]), ("position", evaluation["by_position"])),
        strict=True,
    ):
        axes.plot(
            [row["value"] for row in rows], [row["error"] for row in rows], color="#c1440e", marker="o", markersize=3
        )
        axes.axhline(evaluation["chance_error"], color="#777777", linestyle=":")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_xlabel(name)
        axes.set_ylim(-0.02, 1.02)
        axes.grid(alpha=0.25)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    figure.axes[0].set_ylabel("wrong; dotted: by chance")
    return inline(drawn(figure), "answers-")


def _json(path: Path) -> Any:
    return read_json(path) if path.is_file() else None


def middle(timing: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The median speed, and the largest memory."""
    if not timing:
        return None
    rates = sorted(r["tokens_per_second"] for r in timing)
    mfus = sorted(r["mfu"] for r in timing)
    return {
        "tokens_per_second": rates[len(rates) // 2],
        "mfu": mfus[len(mfus) // 2],
        "memory": max(r["memory"] for r in timing),
        "seconds": timing[-1]["seconds"],
    }
