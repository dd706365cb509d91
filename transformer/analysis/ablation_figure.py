"""What each part is worth, as one figure and as a table: blocks, heads, and the model cut short."""

from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from transformer.analysis.ablation import words
from transformer.pages import STYLE
from transformer.tables import columns

# Colours that colour-blind people can tell apart (Okabe and Ito, 2008), seen on white and on a dark page.
PARTS = {"block": ("whole block", "#777777"), "attention": ("attention", "#0072b2"), "mlp": ("MLP", "#d55e00")}
styled = rc_context({**STYLE, "font.size": 9})


@styled
def figure(found: dict[str, Any]) -> Figure:
    """Left: without each block, its attention, its MLP. Middle: without each head. Right: cut after each block."""
    changes = found["changes"]
    depth = max(one["block"] for one in changes)
    drawn = Figure(figsize=(8, 3.4), layout="constrained")
    parts, heads, cut = drawn.subplots(1, 3, width_ratios=(3, 2.4, 2))

    for place, (kind, (label, colour)) in enumerate(PARTS.items()):
        rows = [one for one in changes if one["kind"] == kind]
        x = [one["block"] + 0.27 * (place - 1) for one in rows]
        parts.bar(x, [one["difference"] for one in rows], 0.25, color=colour, label=label)
        _intervals(parts, x, rows)
    parts.set_title("without it: more bits per byte", fontsize=9)
    parts.legend(frameon=False, fontsize=8)
    parts.set_xlabel("block")
    parts.set_xticks(range(1, depth + 1))

    rows = [one for one in changes if one["kind"] == "head"]
    table_LN = np.array([one["difference"] for one in rows]).reshape(depth, -1)
    most = max(float(np.abs(table_LN).max()), 1e-9)
    image = heads.pcolormesh(np.arange(table_LN.shape[1] + 1) + 0.5, np.arange(depth + 1) + 0.5, table_LN)
    image.set(cmap="RdBu_r", clim=(-most, most))
    drawn.colorbar(image, ax=heads, shrink=0.8)
    heads.set_title("without one head", fontsize=9)
    heads.set(xlabel="head", ylabel="block")
    heads.set_yticks(range(1, depth + 1))
    heads.set_xticks(range(1, table_LN.shape[1] + 1))

    rows = [one for one in changes if one["kind"] == "cut"]
    bits = [*(one["bits_per_byte"] for one in rows), found["bits_per_byte"]]
    cut.plot(range(depth + 1), bits, color="#009e73", marker="o", markersize=4)
    cut.set_title("cut after block k", fontsize=9)
    cut.set(xlabel="k", ylabel="bits per byte")
    cut.set_xticks(range(depth + 1))
    for axes in (parts, cut):
        axes.grid(alpha=0.25)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    return drawn


def _intervals(axes: Axes, x: list[float], rows: list[dict[str, Any]]) -> None:
    for at, one in zip(x, rows, strict=True):
        if one["low"] is not None:
            axes.vlines(at, one["low"], one["high"], color="#000000", linewidth=1)  # the page's own, for light and dark


def cells(found: dict[str, Any]) -> list[list[str]]:
    """A row for each change, what makes most difference first: what was done, difference, interval, bits per byte."""
    rows = []
    for one in sorted(found["changes"], key=lambda one: -one["difference"]):
        interval = "" if one["low"] is None else f"{one['low']:+.4f} to {one['high']:+.4f}"
        rows.append([words(one), f"{one['difference']:+.4f}", interval, f"{one['bits_per_byte']:.4f}"])
    return rows


def block_cells(found: dict[str, Any]) -> list[list[str]]:
    """A row for each block: its numbers, and the heads with the highest scores."""

    def highest(scores: list[float] | None) -> str:
        if scores is None:
            return ""
        n = int(np.argmax(scores))
        return f"{scores[n]:.2f} (head {n + 1})"

    rows = []
    for one in found["blocks"]:
        norms = (one[f"{name}_norm"] for name in ("gradient", "residual", "attention", "mlp"))
        loop = f", time {one['loop']}" if found["blocks"][-1]["loop"] > 1 else ""
        scores = (highest(one[name]) for name in ("previous_token", "induction"))
        rows.append([f"{one['block']}{loop}", *(f"{x:.3g}" for x in norms), *scores])
    return rows


HEADINGS = ("what was done", "difference", "95 % interval", "bits per byte")
BLOCK_HEADINGS = (
    *("block", "gradient norm", "stream", "attention adds", "MLP adds"),
    *("best previous-token head", "best induction head"),
)


def sentence(found: dict[str, Any]) -> str:
    """The result as a person reads it in a terminal."""
    head = (
        f"{found['text']}: {found['bits_per_byte']:.4f} bits per byte, step {found['step']}\n"
        f"{found['windows']} windows, {found['tokens']:,} tokens, {found['documents']} documents; "
        f"intervals from {found['resamples']} paired resamples of {found['units']} {found['unit']}\n"
    )
    changes, blocks = columns([HEADINGS, *cells(found)]), columns([BLOCK_HEADINGS, *block_cells(found)])
    return "\n".join([head, *changes, "", *blocks])
