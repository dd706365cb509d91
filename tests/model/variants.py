"""The kinds of model that exist, and a short list of them in which every two choices meet once."""

import itertools
from random import Random
from typing import Any

from transformer.model.attention import Attention
from transformer.model.grouped import Grouped, MultiHead, MultiQuery
from transformer.model.mlp import Geglu, Gelu, Swiglu
from transformer.model.norms import LayerNorm, RmsNorm
from transformer.model.positions import (
    Alibi,
    Learned,
    Linear,
    Llama3,
    None_,
    Ntk,
    Relative,
    Rotary,
    Sinusoidal,
    Yarn,
)
from transformer.model.scores import Sigmoid, Softmax
from transformer.model.spans import Chunked, Global, Pattern, Sliding
from transformer.settings import tag_of

# Every choice of every setting that changes the mathematics, or the program that computes it.
CHOICES: dict[str, tuple[Any, ...]] = {
    "attention.projection": (MultiHead(), MultiQuery(), Grouped(kv_heads=2)),
    "attention.span": (
        Global(),
        Sliding(window=3),
        Chunked(chunk=3),
        Pattern(local=Sliding(window=2)),
    ),
    "attention.scores": (
        Softmax(),
        Softmax(soft_cap=1.5),
        Softmax(sinks=True),
        Sigmoid(),
        Sigmoid(soft_cap=1.5, bias=0.5),
    ),
    "attention.qk_norm": ("none", "head", "width"),
    "attention.gate": (False, True),
    "attention.bias": ("as_model", "qkv"),
    "attention.score_width": (None, 3.0),
    "positions": (
        Learned(),
        Sinusoidal(base=50.0),
        Rotary(base=50.0),
        Rotary(base=50.0, share=0.6, scaling=Linear()),
        Rotary(base=50.0, scaling=Ntk()),
        Rotary(base=50.0, scaling=Yarn(original_context=8, fast=1.0, slow=0.2)),
        Rotary(base=50.0, scaling=Llama3(original_context=8)),
        Alibi(),
        Relative(buckets=4, farthest=6),
        None_(),
    ),
    "norms": ("pre", "post", "sandwich", "peri", "after"),
    "parallel": (False, True),
    "loops": (1, 2),
    "logits_soft_cap": (None, 2.0),
    "norm": (LayerNorm(epsilon=1e-3), RmsNorm(epsilon=1e-3), RmsNorm(epsilon=1e-3, centered=True)),
    "final_norm": (True, False),
    "mlp": (Gelu(width=24), Swiglu(), Gelu(exact=True), Geglu(width=24)),
    "scale_embedding": (False, True),
    "tie_embeddings": (False, True),
    "bias": (False, True),
    "head_width": (None, 6),
    "stack": ("unroll", "scan"),
    "depth": (2, 3),
}
ATTENTION = tuple(
    (Attention(projection=projection), positions)
    for projection in CHOICES["attention.projection"]
    for positions in CHOICES["positions"][:3]
)


def valid(choice: dict[str, Any]) -> bool:
    """Whether the library builds it: what it refuses is tested where it is refused."""
    return not (choice["parallel"] and choice["norms"] == "post")


def settings(choice: dict[str, Any]) -> dict[str, Any]:
    """The settings of a model, as `small.experiment` takes them."""
    own = {name.partition(".")[2]: value for name, value in choice.items() if name.startswith("attention.")}
    return {"attention": Attention(**own)} | {k: v for k, v in choice.items() if not k.startswith("attention.")}


def random(count: int, seed: int) -> list[dict[str, Any]]:
    """So many of all the combinations, drawn at random."""
    draw, found = Random(seed), []
    while len(found) < count:
        choice = {name: draw.choice(values) for name, values in CHOICES.items()}
        found += [choice] if valid(choice) else []
    return found


def pairwise() -> list[dict[str, Any]]:
    """Every pair of choices of two settings occurs in at least one of these: the best of some candidates each time."""
    everything = {name: range(len(values)) for name, values in CHOICES.items()}
    missing = {
        ((a, i), (b, j)) for a, b in itertools.combinations(CHOICES, 2) for i in everything[a] for j in everything[b]
    }
    missing -= {(("norms", 1), ("parallel", 1))}
    draw, chosen = Random(0), []
    while missing:
        wanted = min(missing)  # each candidate has this pair, so the list gets shorter whatever is drawn
        candidates = []
        for _ in range(60):
            places = {name: draw.choice(numbers) for name, numbers in everything.items()} | dict(wanted)
            if valid({name: CHOICES[name][i] for name, i in places.items()}):
                candidates.append(places)
        best = max(candidates, key=lambda places: len(_pairs(places) & missing))
        missing -= _pairs(best)
        chosen.append({name: CHOICES[name][i] for name, i in best.items()})
    return chosen


def _pairs(places: dict[str, int]) -> set[Any]:
    return set(itertools.combinations(places.items(), 2))


def model_name(choice: dict[str, Any]) -> str:
    """A short name for test reports: what differs from the first choices."""
    names = []
    for name, value in choice.items():
        place = CHOICES[name].index(value)
        short = tag_of(type(value)) if hasattr(value, "__dataclass_fields__") else f"{name.rpartition('.')[2]}={value}"
        names += [f"{short}{place}" if hasattr(value, "__dataclass_fields__") else short] if place else []
    return "-".join(names) or "plain"
