"""OLMo 2: each branch is normed after it alone, queries and keys over their whole width."""

from typing import Any

from transformer.interop import llama, rope
from transformer.interop.common import (
    ATTENTION,
    DOWN,
    ENDS,
    INV_FREQ,
    LAYER,
    OUT,
    QK_NORM,
    WIDEN,
    Family,
    gated,
    projection,
    sizes,
)
from transformer.interop.keys import Keys
from transformer.interop.layouts import norm
from transformer.model.attention import Attention
from transformer.model.config import Model
from transformer.model.norms import RmsNorm


def read(keys: Keys) -> Model:
    own = sizes(keys)
    return Model(
        **own,
        attention=Attention(
            projection=projection(keys),
            qk_norm="width",
            bias="all" if keys.flag("attention_bias", False) else "as_model",
        ),
        positions=rope.read(keys, own["head_width"] or own["width"] // own["heads"]),
        norm=RmsNorm(epsilon=keys.number("rms_norm_eps", 1e-5)),
        norms="after",
        mlp=gated(keys, "hidden_act"),
        tie_embeddings=keys.flag("tie_word_embeddings", False),
    )


def write(m: Model) -> dict[str, Any]:
    return {k: v for k, v in llama.write(m).items() if k not in ("mlp_bias", "head_dim")}


NORMS = (
    *norm(f"{LAYER}.post_attention_layernorm", "attention_norm_after"),
    *norm(f"{LAYER}.post_feedforward_layernorm", "mlp_norm_after"),
)
ENTRIES = (*ENDS, *ATTENTION, *QK_NORM, *OUT, *WIDEN, *DOWN, *NORMS)
FAMILY = Family("olmo2", "Olmo2ForCausalLM", "model.", read, write, ENTRIES, INV_FREQ)
