"""The kinds of model that exist, and a short list of them in which every two choices meet once."""

import itertools
from typing import Any

from transformer.model.attention import Attention
from transformer.model.grouped import Grouped, MultiHead, MultiQuery
from transformer.model.mlp import Gelu, Swiglu
from transformer.model.norms import LayerNorm, RmsNorm
from transformer.model.positions import Learned, Rotary, Sinusoidal

# Every choice of every setting that changes the mathematics, or the program that computes it.
CHOICES: dict[str, tuple[Any, ...]] = {
    "attention": tuple(Attention(projection=p) for p in (MultiHead(), MultiQuery(), Grouped(kv_heads=2))),
    "positions": (Learned(), Sinusoidal(base=50.0), Rotary(base=50.0)),
    "norm": (LayerNorm(epsilon=1e-3), RmsNorm(epsilon=1e-3)),
    "final_norm": (True, False),
    "mlp": (Gelu(width=24), Swiglu()),
    "tie_embeddings": (False, True),
    "bias": (False, True),
    "head_width": (None, 6),
    "stack": ("unroll", "scan"),
}
ATTENTION = tuple(itertools.product(CHOICES["attention"], CHOICES["positions"]))


def grid() -> list[dict[str, Any]]:
    """All of them."""
    return [dict(zip(CHOICES, values, strict=True)) for values in itertools.product(*CHOICES.values())]


def pairwise() -> list[dict[str, Any]]:
    """A greedy cover: every pair of choices of two settings occurs in at least one model."""
    everything = grid()
    pairs = {model_name(v): _pairs(v) for v in everything}
    missing = set().union(*pairs.values())
    chosen = []
    while missing:
        best = max(everything, key=lambda v: len(pairs[model_name(v)] & missing))
        chosen.append(best)
        missing -= pairs[model_name(best)]
    return chosen


def _pairs(variant: dict[str, Any]) -> set[Any]:
    named = [(key, _name(value)) for key, value in variant.items()]
    return set(itertools.combinations(named, 2))


def model_name(variant: dict[str, Any]) -> str:
    """A short name for test reports."""
    parts = [_name(v) if not isinstance(v, bool | int | None) else f"{k}={v}" for k, v in variant.items()]
    return "-".join(parts)


def _name(value: Any) -> str:
    if isinstance(value, Attention):
        value = value.projection
    return type(value).__name__ if hasattr(value, "__dataclass_fields__") else str(value)
