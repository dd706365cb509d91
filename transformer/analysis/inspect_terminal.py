"""The chain of `inspect` drawn in the terminal: one position's way from its token to the distribution."""

import io
import math
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from transformer.analysis.inspection import Inspection, Token, text_of
from transformer.settings import tag_of
from transformer.tables import shown

WIDTH = 120
BAR = 24  # cells of the longest bar
SEVERAL = 3  # likely tokens behind each block


def drawn(found: Inspection, t: int, colour: bool) -> str:
    """The way of position ``t`` as lines of text; ``colour``: for a terminal that shows it."""
    console = Console(file=io.StringIO(), width=WIDTH, force_terminal=colour, color_system="256" if colour else None)
    token, model, last = found.tokens[t], found.model, len(found.said.entropy) - 1
    largest = max(found.attention_PT[:, t].max(), found.mlp_PT[:, t].max(), found.stream_QT[:, t].max())

    line = Text()
    for s, other in enumerate(found.tokens):
        line.append(f" {_name(other)} ", "reverse bold" if s == t else "" if s % 2 else "dim")
    console.print(Text(f"{found.run.directory}, step {found.step}: position {t} of {len(found.tokens)}", "bold"))
    console.print(line)
    console.print(Text(f"\ntoken        {_name(token)}   id {token.id}   bytes {token.content.hex(' ') or 'none'}"))
    console.print(Text(f"embedding    row {token.id} of {model.width} numbers, and positions: {_place(found)}"))
    console.print(Text(f"             the stream begins with length {found.stream_QT[0, t]:.3g}\n"))

    table = Table(box=None, pad_edge=False)
    for title, least in (("", 9), ("attention adds", 14), ("MLP adds", 8), ("stream", BAR)):
        table.add_column(title, no_wrap=True, min_width=least)
    for title in ("strongest heads", "it would say"):  # what is too long for the line is cut here
        table.add_column(title, no_wrap=True, overflow="ellipsis")
    table.add_row("embedding", "", "", _bar(found.stream_QT[0, t], largest), "", _says(found, 0, t))
    for p in range(len(found.weights_PNTS)):
        table.add_row(
            f"block {p % model.depth + 1}",
            f"{found.attention_PT[p, t]:.3g}",
            f"{found.mlp_PT[p, t]:.3g}",
            _bar(found.stream_QT[p + 1, t], largest),
            _heads(found, p, t),
            _says(found, p + 1, t),
        )
    console.print(table)
    console.print(Text(f"\nfinal norm   length {found.stream_QT[last, t]:.3g} becomes {found.normed_T[t]:.3g}"))
    console.print(Text(f"projection   {model.width} numbers x {found.run.tokenizer.vocab_size:,} rows, then softmax\n"))
    console.print(_answer(found, last, t))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().rstrip()


def _answer(found: Inspection, q: int, t: int) -> Any:
    """The distribution as bars, the true next token marked."""
    said, true = found.said, found.tokens[t + 1].id if t + 1 < len(found.tokens) else None
    table = Table(box=None, pad_edge=False, show_header=False)
    rows = list(zip(said.ids[q, t].tolist(), said.probabilities[q, t].tolist(), strict=True))[:10]
    if true is not None and true not in [i for i, _ in rows]:
        rows.append((true, float(said.next_probability[q, t])))
    for i, p in rows:
        mark = "bold red" if i == true else ""
        table.add_row(Text(f"{p:8.3%}", mark), _bar(p, rows[0][1], mark), Text(_spelled(found, i), mark))
    if true is None:
        table.add_row("", f"entropy {said.entropy[q, t]:.2f} bits", "the prompt ends here")
        return table
    p, rank = float(said.next_probability[q, t]), said.next_rank[q, t]
    surprise = -math.log2(p) if p else math.inf
    about = f"truly next: {_spelled(found, true)}   rank {rank}, surprise {surprise:.2f} bits"
    table.add_row("", f"entropy {said.entropy[q, t]:.2f} bits", Text(about))
    return table


def _says(found: Inspection, q: int, t: int) -> Text:
    top = zip(found.said.ids[q, t].tolist(), found.said.probabilities[q, t].tolist(), strict=True)
    return Text("  ".join(f"{_spelled(found, i)} {p:.0%}" for i, p in list(top)[:SEVERAL]))


def _heads(found: Inspection, p: int, t: int) -> Text:
    """The heads with the largest weights: head, weight, and whom they look at."""
    rows_NS = found.weights_PNTS[p, :, t]
    most_N = np.abs(rows_NS).argmax(-1)
    first = sorted(range(len(rows_NS)), key=lambda n: -abs(rows_NS[n, most_N[n]]))[:2]
    return Text("  ".join(f"{n + 1}: {rows_NS[n, most_N[n]]:.0%} {_name(found.tokens[most_N[n]])}" for n in first))


def _bar(value: float, largest: float, style: str = "cyan") -> Text:
    return Text("█" * max(1, round(BAR * value / largest)) if value > 0 else "", style)


def _place(found: Inspection) -> str:
    kind = tag_of(type(found.model.positions))
    return f"{kind}, a vector that is added" if found.added_TD is not None else kind


def _name(token: Token) -> str:
    return _shown(token.content)


def _spelled(found: Inspection, i: int) -> str:
    return _shown(found.run.tokenizer.token_bytes(i))


def _shown(content: bytes) -> str:
    """A token's text with blanks made visible and nothing that a terminal would act on; or its bytes."""
    text = text_of(content)
    if text is None:
        return "".join(f"<0x{b:02X}>" for b in content) or "<end of text>"
    return shown(text).replace(" ", "·")
