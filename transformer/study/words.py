"""Numbers as the report writes them."""

import math
from collections.abc import Mapping
from typing import Any


def digits(value: float | None, scale: float | None, sign: str = "") -> str:
    """``value`` to the second digit of ``scale``, which is how well it is known; empty where there is no value."""
    if value is None:
        return ""
    if not scale or not math.isfinite(scale):
        return f"{value:{sign}.4g}"
    places = 1 - math.floor(math.log10(abs(scale)))
    return f"{value:{sign}.{places}f}" if 0 <= places < 8 else f"{value:{sign}.3g}"


def half(compared: Mapping[str, Any]) -> float | None:
    """Half of a comparison's interval; the difference where there is none."""
    low, high, difference = compared["low"], compared["high"], compared["difference"]
    return difference if low is None else (high - low) / 2


def probability(p: float | None) -> str:
    if p is None:
        return ""
    return f"{p:.2g}" if p >= 0.0001 else "< 0.0001"


def si(value: float) -> str:
    """1700167680 -> '1.7 G'."""
    for unit in ("", "k", "M", "G", "T", "P", "E"):
        if abs(value) < 999.5 or unit == "E":
            return f"{value:.3g} {unit}".strip()
        value /= 1000
    raise AssertionError
