"""Phi-3: Llama with query, key and value in one matrix, and both halves of the gated MLP in another."""

from typing import Any

from transformer.interop import llama, rope
from transformer.interop.common import (
    DOWN,
    ENDS,
    INV_FREQ,
    LAYER,
    OUT,
    PRE_NORMS,
    Family,
    gated,
    projection,
    sizes,
)
from transformer.interop.keys import Keys
from transformer.interop.layouts import linear
from transformer.model.attention import Attention
from transformer.model.config import Model
from transformer.model.norms import RmsNorm
from transformer.model.positions import Rotary
from transformer.model.spans import Global, Sliding


def read(keys: Keys) -> Model:
    own = sizes(keys)
    window = keys.take("sliding_window")
    keys.take("original_max_position_embeddings")  # of a scaling that is refused
    return Model(
        **own,
        attention=Attention(
            projection=projection(keys),
            span=Global() if window is None else Sliding(window=keys.whole("sliding_window")),
        ),
        positions=rope.read(keys, own["head_width"] or own["width"] // own["heads"], share_key="partial_rotary_factor"),
        norm=RmsNorm(epsilon=keys.number("rms_norm_eps", 1e-5)),
        mlp=gated(keys, "hidden_act"),
        tie_embeddings=keys.flag("tie_word_embeddings", False),
    )


def write(m: Model) -> dict[str, Any]:
    rotary = m.positions if isinstance(m.positions, Rotary) else Rotary()
    own = {k: v for k, v in llama.write_mistral(m).items() if k != "head_dim"}
    return own | rope.write(rotary, share_key="partial_rotary_factor")


ENTRIES = (
    *ENDS,
    *PRE_NORMS,
    *linear(f"{LAYER}.self_attn.qkv_proj", "attention/query", "attention/key", "attention/value"),
    *OUT,
    *linear(f"{LAYER}.mlp.gate_up_proj", "mlp/gate", "mlp/up"),
    *DOWN,
)
FAMILY = Family("phi3", "Phi3ForCausalLM", "model.", read, write, ENTRIES, INV_FREQ)
