"""Writes docs/attention.md from the tables in the code: `python -m tests.attention_page`.

The first paragraph of a kind's docstring is its idea, with its sources; what stands there, or else in the docstring of
its file, in double backticks or indented is its equation. Numbers are those of `transformer.analysis.cost`.
"""

import dataclasses
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformer.analysis.cost import cache, count_parameters
from transformer.config import Experiment
from transformer.data.tokenizer import Bytes
from transformer.model.attention import Attention, kind, reach
from transformer.model.config import Model
from transformer.model.positions import Rotary
from transformer.settings import hints, leaves, members, override, tag_of

PAGE = Path(__file__).parents[1] / "docs" / "attention.md"
BASE = Experiment(
    model=Model(depth=2, width=512, heads=8, context=1024, positions=Rotary(), dtype="bfloat16"), tokenizer=Bytes()
)
AXES = {
    "model.attention.projection": "Projections: what queries, keys and values are made of",
    "model.attention.span": "Spans: how far back a query looks",
    "model.attention.scores": "Scores: how weights come from them",
    "model.positions": "Positions: how the order is known",
}
HEAD = """# Kinds of attention

Made from the code by `python -m tests.attention_page`; do not edit. Every projection goes with every span, kind of
scores and kind of positions, but for pairs that are refused with a reason. [`adding_attention.md`](adding_attention.md)
says how to add one, [`reference.md`](reference.md) has all settings.

In equations t is the position of a query and s that of a key it sees, z_ts their score, n a head, N the number of
heads, H the width of one. Numbers are of one block of width {width} with {heads} heads and a context of {context:,} in
{dtype}, mean over a depth of {depth}, with rotary positions and otherwise the defaults:

- **parameters** of its attention;
- **FLOPs** of a token forward at full context, two for each multiply-add, of products and score tables;
- **cache**: bytes that a token adds to it, and what it takes for a full context (a window keeps no more than it sees,
  and a state does not grow).
"""
SOURCE = re.compile(r"arXiv:(\d{4}\.\d{5})((?:, | \()(?:sections?|equations?|eq\.|appendix) \w+(?:\.\d+)*\)?)?")


@dataclasses.dataclass(frozen=True)
class Row:
    """A kind, and what chooses it."""

    cls: type
    changes: dict[str, str]


def rows(axis: str) -> Iterator[Row]:
    """Every kind of a tagged setting, and below it those of its own tagged settings that are no kind of the axis."""
    record: Any = Experiment
    for name in axis.split("."):
        record = hints(record)[name]
    kinds = members(record)
    for tag, cls in kinds.items():
        yield Row(cls, {axis: tag})
        for name, hint in hints(cls).items():
            for inner_tag, inner in members(hint).items():
                if inner not in kinds.values():
                    yield Row(inner, {axis: tag, f"{axis}.{name}": inner_tag})


def idea(cls: type) -> tuple[str, str, str]:
    """Idea, equation and sources of a kind, from its docstring."""
    doc = inspect.getdoc(cls) or ""
    first = " ".join(doc.split("\n\n")[0].split())
    links = [f"[{m[1]}](https://arxiv.org/abs/{m[1]}){m[2] or ''}" for m in SOURCE.finditer(doc)]
    words = re.sub(r"(?:\s*[;,.]?\s*)(?:see )?(?:" + SOURCE.pattern + r"(?:, )?)+", "", first)
    words = re.sub(r"[;.]? [Ss]ee `\w+`", "", words.replace("``", "`")).strip().rstrip(".,;") + "."
    equation = equations(doc) or equations(inspect.getdoc(sys.modules[cls.__module__]) or "")
    return words, "<br>".join(f"`{line}`" for line in equation), ", ".join(links) or "-"


def equations(doc: str) -> list[str]:
    """The lines of a docstring's first block that stands indented or in double backticks."""
    found: list[str] = []
    for line in doc.splitlines():
        if match := re.fullmatch(r"``(.+)``| {4,}(.+)", line):
            found.append(re.sub(" {2,}", "   ", match[1] or match[2]))
        elif found:
            break
    return found


def numbers(e: Experiment) -> tuple[str, str, str]:
    """Parameters, FLOPs and cache of one block's attention."""
    m = e.model
    row, depth = kind(m), m.depth
    parameters, once = row.matrices(m) + row.rest(m), count_parameters(e)["positions"]
    flops = 2 * (row.matrices(m) + sum(row.products(m, reach(m, i)) for i in range(depth)) / depth)
    bill = cache(e)
    return (
        f"{parameters:,}" + (f" and once {once:,}" if once else ""),
        f"{flops:,.0f}",
        f"{bill['bytes_per_token'] // depth:,}; {bill['bytes_per_context'] // depth:,}",
    )


def page() -> str:
    m = BASE.model
    sizes = {name: getattr(m, name) for name in ("width", "heads", "context", "dtype", "depth")}
    lines = [HEAD.format(**sizes)]
    for axis, title in AXES.items():
        lines += [f"## {title}", "", "| kind | idea | equation | parameters | FLOPs | cache | source | to choose it |"]
        lines.append("|---|---|---|---|---|---|---|---|")
        for row in rows(axis):
            e = override(BASE, row.changes)
            chosen = " ".join(f"`--config.{name}={tag}`" for name, tag in row.changes.items())
            words, equation, sources = idea(row.cls)
            cells = (f"`{tag_of(row.cls)}`", words, equation, *numbers(e), sources, chosen)
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        lines.append("")
    own = [name for name in leaves(Attention()) if "." not in name]
    lines.append("Besides: " + ", ".join(f"`model.attention.{name}`" for name in own) + ".")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
