"""A study's figures, for the page and for papers: differences with intervals, curves with bands, learning rates.

Colours are those that colour-blind people can tell apart (Okabe and Ito, 2008), grey is the baseline's, and every
line also has its name beside it. All of them are seen on white and on a dark page.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, FixedLocator, FuncFormatter, MaxNLocator, NullLocator
from scipy.optimize import isotonic_regression

from transformer.pages import STYLE
from transformer.study.directory import Run
from transformer.study.words import digits, half

GREY = "#777777"
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00")
VERDICTS = {"better": "#0072b2", "worse": "#d55e00", "not resolved": GREY}
LABELS = {
    "bits_per_byte": "bits per byte",
    "loss": "loss, nats per token",
    "perplexity": "perplexity per token",
    "accuracy": "accuracy",
    "error": "share of wrong answers",
}
WIDTH = 5.2  # inches: a phone shows it without making the letters small
FAR = 20  # times the middle one: an interval that reaches further is cut, or no other could be seen
Along = Literal["tokens", "flops", "seconds"]
styled = matplotlib.rc_context({**STYLE, "font.size": 9})


@styled
def differences(results: Mapping[str, Any]) -> Figure:
    """Each arm's mean difference to the baseline, with its interval; the zero line is the baseline."""
    arms = results["arms"][1:]
    figure = Figure(figsize=(WIDTH, 0.8 + 0.45 * len(arms)), layout="constrained")
    axes = figure.subplots()
    reaches = sorted(max(abs(end) for end in _ends(arm["comparison"])) for arm in arms if _ends(arm["comparison"]))
    cut = FAR * reaches[(len(reaches) - 1) // 2] if reaches else 1.0
    cut = cut or math.inf  # where most are zero
    axes.annotate(
        "baseline", (0, 1), (0, 3), axes.get_xaxis_transform(), "offset points", ha="center", annotation_clip=False
    )
    for y, arm in zip(range(len(arms) - 1, -1, -1), arms, strict=True):
        compared = arm["comparison"]
        colour, ends = VERDICTS[compared["verdict"]], _ends(compared)
        axes.vlines(0, y - 0.5, y + 0.15, color=GREY, linewidth=1)
        if ends:
            inside = [max(-cut, min(cut, end)) for end in ends]
            axes.plot(inside, [y, y], color=colour, linewidth=2, solid_capstyle="butt", label="interval")
            for end, shown in zip(ends, inside, strict=True):
                if end != shown:
                    axes.plot(shown, y, marker=">" if end > 0 else "<", color=colour, markersize=6)
            if abs(compared["difference"]) <= cut:
                face = colour if compared["verdict"] != "not resolved" else "none"
                axes.plot(compared["difference"], y, "o", color=colour, markerfacecolor=face, markersize=6)
        number = digits(compared["difference"], half(compared), "+")
        said = f"{number}, {compared['verdict']}" if ends else "no number"
        for x, text, side in ((0, _short(arm["name"], 34), "left"), (1, said, "right")):
            place = axes.get_yaxis_transform()
            axes.annotate(text, (x, y), (0, 6), place, "offset points", ha=side, annotation_clip=False)
    axes.set_ylim(-0.5, len(arms) - 0.2)
    axes.yaxis.set_major_locator(NullLocator())
    side = "left" if results["better"] == "less" else "right"
    axes.set_xlabel(f"{LABELS[results['metric']]}: arm minus baseline ({side} is better)")
    _plain(axes, "left")
    return figure


def _ends(compared: Mapping[str, Any]) -> list[float]:
    """The interval; the difference alone where there is none; nothing where there is neither."""
    ends = [compared["low"], compared["high"]] if compared["low"] is not None else [compared["difference"]] * 2
    return [end for end in ends if end is not None]


@styled
def curves(results: Mapping[str, Any], runs: Sequence[Run], along: Along) -> Figure | None:
    """Validation during the training: the mean over the seeds that finished, and the band from lowest to highest.

    A run that failed is a thin line of its own, with a cross at its end. None where no run has a point.
    """
    metric = results["metric"]
    shown = [(run, _line(run, along, metric)) for run in runs]
    shown = [(run, line) for run, line in shown if line]
    if not shown:
        return None
    largest = max(x for _, line in shown for x, _ in line.values())
    size, axis = _axis(along, largest)
    figure = Figure(figsize=(WIDTH, max(3.2, 0.6 + 0.17 * len(results["arms"]))), layout="constrained")
    axes = figure.subplots()
    _frame(axes, [line for run, line in shown if run.state == "finished"])
    ends = []
    for i, arm in enumerate(results["arms"]):
        colour, style = _look(i)
        lines = [line for run, line in shown if run.arm == arm["name"] and run.state == "finished"]
        steps = [step for step in lines[0] if all(step in line for line in lines)] if lines else []
        if steps:
            x = [sum(line[step][0] for line in lines) / len(lines) / size for step in steps]
            values = [[line[step][1] for line in lines] for step in steps]
            mean = [sum(value) / len(value) for value in values]
            axes.fill_between(x, list(map(min, values)), list(map(max, values)), color=colour, alpha=0.2, linewidth=0)
            axes.plot(x, mean, color=colour, linestyle=style, marker="o", markersize=2.5, linewidth=1.4, label="mean")
            ends.append((arm["name"], x[-1], mean[-1], colour))
        for run, line in shown:
            if run.arm == arm["name"] and run.state == "failed":
                xs, ys = zip(*line.values(), strict=True)
                axes.plot([x / size for x in xs], ys, color=colour, linewidth=0.7, label="failed")
                low, high = axes.get_ylim()
                axes.plot(xs[-1] / size, min(max(ys[-1], low), high), "x", color=colour, markersize=6, clip_on=False)
    axes.set_xlim(left=0)
    axes.set_xlabel(axis)
    axes.set_ylabel(f"validation {LABELS[metric]}")
    if along != "seconds":
        axes.xaxis.set_major_formatter(EngFormatter())
    _name(axes, figure.get_figheight(), ends)
    _plain(axes)
    return figure


def _line(run: Run, along: Along, metric: str) -> dict[int, tuple[float, float]]:
    """Step -> where it is drawn."""
    return {p["step"]: (p[along], p[metric]) for p in run.points if p[along] is not None and p[metric] is not None}


def _axis(along: Along, largest: float) -> tuple[float, str]:
    """What one unit of the axis is, and what it is called."""
    if along == "tokens":
        return 1, "tokens"
    if along == "flops":
        return 1, "training FLOPs"
    size, name = next(
        (s, n) for s, n in ((3600, "hours"), (60, "minutes"), (1, "seconds")) if largest > 3 * s or s == 1
    )
    return size, f"{name} of training"


def _frame(axes: Axes, lines: Sequence[Mapping[int, tuple[float, float]]]) -> None:
    """Show what happens in the second half: at the start all curves fall from the same height."""
    late = [y for line in lines for step, (_, y) in line.items() if 2 * step >= max(line)]
    if late:
        margin = 0.06 * (max(late) - min(late)) or 0.01 * abs(late[0]) or 0.01
        axes.set_ylim(min(late) - margin, max(late) + margin)


@styled
def learning_rates(results: Mapping[str, Any]) -> Figure | None:
    """The metric at each learning rate that was tried; a filled circle is the chosen one, a cross failed."""
    tried = results["learning_rates"]
    if not tried:
        return None
    figure = Figure(figsize=(WIDTH, max(3.0, 0.6 + 0.17 * len(results["arms"]))), layout="constrained")
    axes = figure.subplots()
    axes.set_xscale("log")
    ends = []
    for i, arm in enumerate(results["arms"]):
        colour, style = _look(i)
        found = {float(rate): value for rate, value in arm["learning_rate"]["found"].items()}
        x, y = zip(*sorted((rate, value) for rate, value in found.items() if value is not None), strict=True)
        axes.plot(x, y, color=colour, linestyle=style, marker="o", markerfacecolor="none", linewidth=1.4, label="tried")
        best = min(found, key=lambda rate: abs(rate - arm["learning_rate"]["chosen"]))
        axes.plot(best, found[best], "o", color=colour, markersize=6)
        ends.append((arm["name"], x[-1], y[-1], colour))
        failed = [rate for rate, value in found.items() if value is None]
        axes.plot(failed, [0.98] * len(failed), "x", color=colour, transform=axes.get_xaxis_transform())
    axes.xaxis.set_major_locator(FixedLocator(sorted(tried)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda rate, _: f"{rate:g}"))
    axes.set_xlabel("learning rate")
    axes.set_ylabel(LABELS[results["metric"]])
    _name(axes, figure.get_figheight(), ends)
    _plain(axes)
    return figure


@styled
def answers(found: Mapping[str, Any]) -> Figure:
    """Error over difficulty: each arm's mean over seeds, and the band from its lowest to its highest seed."""
    drawing = Figure(figsize=(WIDTH, 3.4), layout="constrained")
    axes = drawing.subplots()
    ends = []
    for i, arm in enumerate(found["arms"]):
        points = [
            (value, mean, *span)
            for value, mean, span in zip(found["values"], arm["errors"], arm["spans"], strict=True)
            if mean is not None
        ]
        if points:
            x, mean, low, high = zip(*points, strict=True)
            colour, style = _look(i)
            axes.fill_between(x, low, high, color=colour, alpha=0.2, linewidth=0)
            axes.plot(x, mean, color=colour, linestyle=style, marker="o", markersize=3, linewidth=1.4)
            ends.append((arm["name"], x[-1], mean[-1], colour))
    axes.axhline(found["chance"], color=GREY, linewidth=1, linestyle=":")
    axes.annotate("chance", (0, found["chance"]), (2, 3), axes.get_yaxis_transform(), "offset points", color=GREY)
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel(found["difficulty"])
    axes.set_ylabel("share of wrong answers")
    _name(axes, drawing.get_figheight(), ends)
    _plain(axes)
    return drawing


@styled
def law(results: Mapping[str, Any], found: Mapping[str, Any]) -> Figure:
    """A power law (`fits.of_study`): every seed's value, the law over the sizes, and its band."""
    fit, points = found["fit"], found["points"]
    drawing = Figure(figsize=(WIDTH, 3.2), layout="constrained")
    axes = drawing.subplots()
    axes.set_xscale("log")
    sizes = np.geomspace(fit.sizes[0], fit.sizes[-1], 60)
    tails = (1 - fit.confidence) / 2, (1 + fit.confidence) / 2
    low, high = np.quantile(fit.samples.at(sizes), tails, axis=0)
    axes.fill_between(sizes, low, high, color=COLOURS[0], alpha=0.2, linewidth=0)
    axes.plot(sizes, fit.floor + fit.scale * sizes**-fit.exponent, color=COLOURS[0], linewidth=1.4)
    for size, values in sorted(points.items()):
        axes.plot([size] * len(values), values, "o", color=GREY, markersize=3)
    axes.set_xlabel(found["name"])
    axes.set_ylabel(LABELS[results["metric"]])
    axes.xaxis.set_major_locator(FixedLocator(fit.sizes))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(EngFormatter())
    _plain(axes)
    return drawing


def _look(i: int) -> tuple[str, str]:
    """Colour and line style of arm ``i``; 0 is the baseline."""
    return (GREY, "-") if i == 0 else (COLOURS[(i - 1) % len(COLOURS)], ("-", "--", ":")[(i - 1) // len(COLOURS) % 3])


def _name(axes: Axes, inches: float, ends: Sequence[tuple[str, float, float, str]]) -> None:
    """Write each line's name at its end, on the right, apart from each other."""
    low, high = axes.get_ylim()
    height = 72 * inches - 40  # points, of the axes
    gap = 10.5 / height * (high - low)
    ends = sorted(((name, x, min(max(y, low), high), colour) for name, x, y, colour in ends), key=lambda end: end[2])
    # The places nearest to the lines' ends that are at least a gap apart.
    steps = gap * np.arange(len(ends))
    places = isotonic_regression(np.array([y for _, _, y, _ in ends]) - steps).x + steps if ends else steps
    for (name, x, y, colour), place in zip(ends, places, strict=True):
        axes.annotate(
            _short(name, 22),
            (x, y),
            (1.04, place),
            "data",
            axes.get_yaxis_transform(),
            va="center",
            annotation_clip=False,
            arrowprops={
                "arrowstyle": "-",
                "color": colour,
                "linewidth": 0.8,
                "shrinkA": 0,
                "shrinkB": 1,
                "relpos": (0, 0.5),
            },
        )


def _short(name: str, letters: int) -> str:
    name = " ".join("".join(c if c.isprintable() else " " for c in name).split())
    return name if len(name) <= letters else name[: letters - 1] + "…"


def _plain(axes: Axes, *without: str) -> None:
    for side in ("top", "right", *without):
        axes.spines[side].set_visible(False)
    axes.grid(alpha=0.25)
