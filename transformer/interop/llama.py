"""Llama 1 to 3, SmolLM 1 and 2, and Mistral: the same names; Mistral's blocks may see a window."""

from typing import Any

from transformer.interop import rope
from transformer.interop.common import (
    ATTENTION,
    DOWN,
    ENDS,
    INV_FREQ,
    OUT,
    PRE_NORMS,
    WIDEN,
    Family,
    activation,
    gated,
    projection,
    sizes,
    write_sizes,
)
from transformer.interop.keys import Keys
from transformer.model.attention import Attention
from transformer.model.config import Model
from transformer.model.norms import RmsNorm
from transformer.model.positions import Rotary
from transformer.model.spans import Global, Sliding

BIAS = {(False, False): (False, "as_model"), (True, True): (True, "as_model"), (True, False): (False, "all")}
BIAS |= {(False, True): (True, "none")}  # attention, MLP -> model.bias, model.attention.bias


def read(keys: Keys, window: bool = False) -> Model:
    own = sizes(keys)
    width = None
    if window:
        width = keys.whole("sliding_window") if keys.has("sliding_window") else keys.take("sliding_window")
    bias = (False, False) if window else (keys.flag("attention_bias", False), keys.flag("mlp_bias", False))
    everywhere, here = BIAS[bias]
    return Model(
        **own,
        attention=Attention(
            projection=projection(keys),
            span=Sliding(window=width) if width else Global(),
            bias=here,  # type: ignore[arg-type]
        ),
        positions=rope.read(keys, own["head_width"] or own["width"] // own["heads"]),
        norm=RmsNorm(epsilon=keys.number("rms_norm_eps", 1e-6)),
        mlp=gated(keys, "hidden_act"),
        bias=bool(everywhere),
        tie_embeddings=keys.flag("tie_word_embeddings", False),
    )


def write(m: Model) -> dict[str, Any]:
    rotary = m.positions if isinstance(m.positions, Rotary) else Rotary()
    inner, _ = m.attention.biased(m.bias)
    return write_sizes(m) | {
        "head_dim": m.head_size,
        "attention_bias": inner,
        "mlp_bias": m.bias,
        "rms_norm_eps": m.norm.epsilon,
        "hidden_act": activation(m),
        "tie_word_embeddings": m.tie_embeddings,
        **rope.write(rotary),
    }


def read_mistral(keys: Keys) -> Model:
    return read(keys, window=True)


def write_mistral(m: Model) -> dict[str, Any]:
    own = {k: v for k, v in write(m).items() if k not in ("attention_bias", "mlp_bias")}
    return own | {"sliding_window": m.attention.span.window if isinstance(m.attention.span, Sliding) else None}


ENTRIES = (*ENDS, *PRE_NORMS, *ATTENTION, *OUT, *WIDEN, *DOWN)
FAMILY = Family("llama", "LlamaForCausalLM", "model.", read, write, ENTRIES, INV_FREQ)
MISTRAL = Family("mistral", "MistralForCausalLM", "model.", read_mistral, write_mistral, ENTRIES, INV_FREQ)
