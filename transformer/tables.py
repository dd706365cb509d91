"""Text for people: columns that stand under one another, sizes, and values that stay within their line."""

from collections.abc import Iterable, Sequence
from typing import Any


def columns(rows: Iterable[Sequence[str]], indent: str = "") -> list[str]:
    """Each row as a line, its cells padded to the widest of their column. Nothing is cut off."""
    rows = list(rows)
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return [(indent + line).rstrip() for line in lines]


def shown(value: Any) -> str:
    """A value as one line that any terminal can print: what is no printable character is escaped."""
    if isinstance(value, list | tuple):
        return ",".join(map(shown, value))
    text = "-" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)
    if not text:
        return "''"
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def human(size: float) -> str:
    """1536 -> '1.5 KiB'."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024 or unit == "TiB":
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    raise AssertionError
