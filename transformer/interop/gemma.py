"""Gemma 1 to 3: scaled embeddings, norms that keep their distance from one, GeGLU; Gemma 2 and 3: four norms a block,
windows by turns, soft caps; Gemma 3: norms over the heads and a rotary base of the windows' own."""

from typing import Any

from transformer.errors import UserError
from transformer.interop import llama, rope
from transformer.interop.common import (
    ATTENTION,
    DOWN,
    ENDS,
    FOUR_NORMS,
    INV_FREQ,
    OUT,
    QK_NORM,
    WIDEN,
    Family,
    activation,
    gated,
    pattern,
    projection,
    sizes,
    write_pattern,
    write_sizes,
)
from transformer.interop.keys import Keys
from transformer.model.attention import Attention
from transformer.model.config import Model
from transformer.model.norms import RmsNorm
from transformer.model.positions import Rotary
from transformer.model.scores import Softmax
from transformer.model.spans import Global, Pattern, Sliding


def _common(keys: Keys) -> tuple[dict[str, Any], int, str]:
    """Keywords of Model that all three share, the head's width and attention's bias."""
    head = keys.whole("head_dim", 256)
    own = sizes(keys)
    own["head_width"] = None if head * own["heads"] == own["width"] else head
    keys.must_be("use_bidirectional_attention", False)
    own |= {
        "norm": RmsNorm(epsilon=keys.number("rms_norm_eps", 1e-6), centered=True),
        "scale_embedding": True,
        "tie_embeddings": keys.flag("tie_word_embeddings", True),
    }
    return own, head, "all" if keys.flag("attention_bias", False) else "as_model"


def read(keys: Keys) -> Model:
    own, head, bias = _common(keys)
    keys.take("hidden_act")
    name = "hidden_activation" if keys.has("hidden_activation") else "hidden_act"
    mlp = gated(keys, name, "gelu_pytorch_tanh", exact=False)  # the releases say gelu, and mean the tanh form
    attention = Attention(projection=projection(keys), bias=bias)  # type: ignore[arg-type]
    return Model(**own, attention=attention, positions=rope.read(keys, head), mlp=mlp)


def write(m: Model) -> dict[str, Any]:
    rotary = m.positions if isinstance(m.positions, Rotary) else Rotary()
    return write_sizes(m) | {
        "head_dim": m.head_size,
        "attention_bias": m.attention.biased(m.bias)[0],
        "rms_norm_eps": m.norm.epsilon,
        "hidden_act": activation(m),
        "tie_word_embeddings": m.tie_embeddings,
        **rope.write(rotary),
    }


def _cap(keys: Keys, name: str, usual: float | None) -> float | None:
    """A soft cap: null means none; an absent key means the usual one."""
    keys.take(name)
    if keys.has(name):
        return keys.number(name)
    return None if keys.given(name) else usual


def _later(keys: Keys, three: bool) -> Model:
    own, head, bias = _common(keys)
    per = keys.whole("sliding_window_pattern", keys.take("_sliding_window_pattern", 6 if three else 2))
    span = pattern(keys, [(i + 1) % per == 0 for i in range(own["depth"])], keys.whole("sliding_window", 4096))
    positions = rope_of_both(keys, head) if three else (rope.read(keys, head), None)
    if isinstance(span, Pattern) and positions[1] is not None:
        span = Pattern(blocks=span.blocks, local=span.local, local_base=positions[1])
    scalar = keys.number("query_pre_attn_scalar", 256)
    attention = Attention(
        projection=projection(keys),
        span=span,
        scores=Softmax(soft_cap=_cap(keys, "attn_logit_softcapping", None if three else 50.0)),
        qk_norm="head" if three else "none",
        bias=bias,  # type: ignore[arg-type]
        score_width=None if scalar == head else scalar,
    )
    rotary = positions[0]
    if isinstance(span, Sliding) and positions[1] is not None:
        rotary = Rotary(base=positions[1])
    return Model(
        **own,
        attention=attention,
        positions=rotary,
        norms="sandwich",
        mlp=gated(keys, "hidden_activation", "gelu_pytorch_tanh"),
        logits_soft_cap=_cap(keys, "final_logit_softcapping", None if three else 30.0),
    )


def rope_of_both(keys: Keys, head: int) -> tuple[Rotary, float | None]:
    """Rotary of the blocks that see everything, and the base of the others; None where that is the same."""
    new = keys.group("rope_parameters")
    full, sliding = new.get("full_attention") or {}, new.get("sliding_attention") or {}
    if (
        set(new) - {"full_attention", "sliding_attention"}
        or not isinstance(full, dict)
        or not isinstance(sliding, dict)
    ):
        raise keys.refuse("rope_parameters", "wanted full_attention and sliding_attention")
    values = {"rope_theta": keys.take("rope_theta", full.get("rope_theta", 1_000_000.0)), "rope_parameters": full}
    values |= {
        "rope_scaling": keys.take("rope_scaling"),
        "max_position_embeddings": keys.take("max_position_embeddings"),
    }
    rotary = rope.read(Keys(keys.where, values), head)
    local = keys.number("rope_local_base_freq", sliding.get("rope_theta", 10_000.0))
    if sliding.get("rope_theta", local) != local or sliding.get("rope_type", "default") != "default":
        raise UserError(f"{keys.where}: rope_parameters.sliding_attention {sliding} is scaled, or not as beside it")
    return rotary, None if rotary == Rotary(base=local) else local


def read_two(keys: Keys) -> Model:
    return _later(keys, three=False)


def read_three(keys: Keys) -> Model:
    return _later(keys, three=True)


def write_two(m: Model) -> dict[str, Any]:
    own = write(m) | write_pattern(m)
    own["hidden_activation"] = own.pop("hidden_act")
    if isinstance(m.attention.span, Global):
        own["sliding_window"] = 4096  # of no block
    cap = m.attention.scores.soft_cap
    return own | {
        "query_pre_attn_scalar": _whole(m.attention.score_width or m.head_size),
        "attn_logit_softcapping": cap,
        "final_logit_softcapping": m.logits_soft_cap,
    }


def _whole(x: float) -> float:
    return int(x) if float(x).is_integer() else x


def write_three(m: Model) -> dict[str, Any]:
    own = write_two(m)
    span, full = m.attention.span, own["rope_parameters"]
    base = own["rope_theta"]
    local = span.local_base if isinstance(span, Pattern) and span.local_base else base
    sliding = {"rope_type": "default", "rope_theta": local}
    return own | {
        "rope_local_base_freq": local,
        "rope_parameters": {"full_attention": full, "sliding_attention": sliding},
    }


INNER = (*ENDS, *ATTENTION, *OUT, *WIDEN, *DOWN)
FAMILY = Family("gemma", "GemmaForCausalLM", "model.", read, write, llama.ENTRIES, INV_FREQ)
GEMMA2 = Family("gemma2", "Gemma2ForCausalLM", "model.", read_two, write_two, (*INNER, *FOUR_NORMS), INV_FREQ)
GEMMA3 = Family(
    "gemma3_text", "Gemma3ForCausalLM", "model.", read_three, write_three, (*INNER, *FOUR_NORMS, *QK_NORM), INV_FREQ
)
