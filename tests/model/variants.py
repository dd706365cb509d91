"""The kinds of model that exist, and a short list of them in which every two choices meet once."""

import itertools
from random import Random
from typing import Any

from transformer.model.attention import Attention
from transformer.model.differential import Differential
from transformer.model.grouped import Grouped, MultiHead, MultiQuery
from transformer.model.latent import Latent
from transformer.model.linear import Linear as LinearAttention
from transformer.model.mlp import Geglu, Gelu, Swiglu
from transformer.model.moe import Moe
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
    "attention.projection": (
        MultiHead(),
        MultiQuery(),
        Grouped(kv_heads=2),
        Latent(kv_rank=6, q_rank=7, rope_width=6),
        Differential(),
        LinearAttention(slowness=2.0),
    ),
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
    "attention.value_residual": ("none", "fixed", "learned"),
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
    "mlp": (
        Gelu(width=24),
        Gelu(exact=True),
        Swiglu(),
        Geglu(width=24),
        Moe(experts=4, width=8),
        Moe(experts=5, top_k=3, shared=2, width=4, scores="sigmoid"),
        Moe(experts=3, top_k=1, width=8, normalise=False),
    ),
    "scale_embedding": (False, True),
    "tie_embeddings": (False, True),
    "bias": (False, True),
    "head_width": (None, 6),
    "stack": ("unroll", "scan"),
    "depth": (2, 3),
}
NEW = (Latent, Differential, LinearAttention)  # what does not share its keys and values out as the first three do
RICH = (Attention(projection=Grouped(kv_heads=2)), Rotary(base=50.0))
ATTENTION = (
    *(
        (Attention(projection=projection), positions)
        for projection in CHOICES["attention.projection"][:3]
        for positions in CHOICES["positions"][:3]
    ),
    (Attention(projection=Latent(kv_rank=6, rope_width=4, norm=False)), Rotary(base=50.0)),
    (Attention(projection=Differential(), value_residual="learned"), Rotary(base=50.0)),
    (Attention(projection=LinearAttention(), value_residual="fixed"), Rotary(base=50.0)),
)


def valid(choice: dict[str, Any]) -> bool:
    """Whether the library builds it: what it refuses is tested where it is refused."""
    if choice["parallel"] and choice["norms"] == "post":
        return False
    projection, positions = choice["attention.projection"], choice["positions"]
    if isinstance(projection, Latent | LinearAttention) and (
        choice["attention.bias"] != "as_model" or choice["attention.score_width"] is not None
    ):
        return False
    if isinstance(projection, Latent):
        return choice["attention.qk_norm"] == choice["attention.value_residual"] == "none"
    if isinstance(projection, Differential) and isinstance(positions, Rotary):
        return choice["head_width"] is None and positions.share == 1 and not isinstance(positions.scaling, Ntk)
    if isinstance(projection, LinearAttention):
        usual = choice["attention.scores"] == Softmax() and choice["attention.span"] == Global()
        return usual and not isinstance(positions, Alibi | Relative)
    return True


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
    draw, chosen = Random(0), []
    plain = {name: numbers[0] for name, numbers in everything.items()}
    missing = {pair for pair in missing if valid({n: CHOICES[n][i] for n, i in (plain | dict(pair)).items()})}
    # How speeds are scaled is the same for all projections: each new one meets one kind of rotary positions.
    own = [i for i, x in enumerate(CHOICES["attention.projection"]) if isinstance(x, NEW)]
    scaled = [i for i, x in enumerate(CHOICES["positions"]) if isinstance(x, Rotary)][1:]
    missing -= {(("attention.projection", i), ("positions", j)) for i in own for j in scaled}
    while missing:
        wanted = min(missing)  # each candidate has this pair, so the list gets shorter whatever is drawn
        candidates: list[dict[str, int]] = []
        while len(candidates) < 40:
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
