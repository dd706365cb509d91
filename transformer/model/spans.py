"""How far back a query looks: everywhere, into a window, into its own chunk; or one of these in each block by turns."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Literal

from transformer.errors import UserError
from transformer.settings import settings

if TYPE_CHECKING:
    from transformer.model.config import Model


@settings
class Global:
    """Every position up to its own.

    ``s <= t``
    """


@settings
class Sliding:
    """The last ``window`` positions, its own among them. arXiv:2004.05150, section 3.1.

    ``t - window < s <= t``
    """

    window: int = 128


@settings
class Chunked:
    """The positions of its own chunk: a text is cut into chunks of that many from its start. arXiv:1904.10509.

    ``s <= t, floor(s / chunk) = floor(t / chunk)``
    """

    chunk: int = 128


@settings
class Pattern:
    """Blocks that see a part and blocks that see everything, by turns over the depth. arXiv:2408.00118, section 2.

    ``block i has the span blocks[i mod their number]``
    """

    blocks: tuple[Literal["local", "global"], ...] = ("local", "global")
    local: Sliding | Chunked | Global = Sliding()  # global: those blocks differ by their positions alone
    local_base: float | None = None  # rotary's base in blocks that see a part, unscaled there; none: as everywhere
    rotate_global: bool = True  # false: the global blocks get no positions (arXiv:2305.19466, NoPE)


Span = Global | Sliding | Chunked | Pattern


def of_block(span: Span, i: int) -> Global | Sliding | Chunked:
    """The span of block ``i`` (0, 1, ...)."""
    if not isinstance(span, Pattern):
        return span
    return span.local if is_local(span, i) else Global()


def is_local(span: Pattern, i: int) -> bool:
    """Whether block ``i`` is one of the pattern's local ones."""
    return span.blocks[i % len(span.blocks)] == "local"


def period(span: Span) -> int:
    """After how many blocks the spans repeat."""
    return len(span.blocks) if isinstance(span, Pattern) else 1


def has_chunks(span: Span) -> bool:
    """Whether any block sees its own chunk alone."""
    return any(isinstance(of_block(span, i), Chunked) for i in range(period(span)))


def reach(span: Span) -> int | None:
    """How many keys a query sees at most; None where that grows with the text."""
    if isinstance(span, Sliding):
        return span.window
    return span.chunk if isinstance(span, Chunked) else None


def widened(model: Model, more: int) -> Model:
    """The settings of a block (`Model.block`) that sees ``more`` keys than this one, where it does not see all."""
    span = model.attention.span
    if isinstance(span, Sliding):
        span = Sliding(window=span.window + more)
    elif isinstance(span, Chunked):
        span = Chunked(chunk=span.chunk + more)
    return dataclasses.replace(model, attention=dataclasses.replace(model.attention, span=span))


def limits(span: Span) -> dict[str, Any]:
    """What a block's span sets of a mask, and so of a call of a kernel."""
    if isinstance(span, Sliding):
        return {"window": span.window}
    return {"chunk": span.chunk} if isinstance(span, Chunked) else {}


def check(model: Model) -> None:
    """UserError for a span that sees nothing, or a pattern that is none."""
    span, where = model.attention.span, "config.model.attention.span"
    if isinstance(span, Pattern):
        if set(span.blocks) != {"local", "global"}:
            raise UserError(f"{where}.blocks: {','.join(span.blocks)!r} needs local and global blocks, or another span")
        if model.depth < len(span.blocks):
            raise UserError(
                f"{where}.blocks: a pattern of {len(span.blocks)} blocks does not fit a depth of {model.depth}"
            )
        if isinstance(span.local, Global) and span.rotate_global and span.local_base is None:
            raise UserError(
                f"{where}.local: global makes all blocks of the pattern alike; set rotate_global=false or local_base, "
                "or span=global"
            )
        span, where = span.local, f"{where}.local"
    for name in ("window", "chunk"):
        if getattr(span, name, 1) < 1:
            raise UserError(f"{where}.{name}: {getattr(span, name)} is too small, set 1 or more")
