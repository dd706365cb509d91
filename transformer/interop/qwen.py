"""Qwen 2 and 2.5: Llama with biases of query, key and value. Qwen 3: with a norm over each head of query and key."""

from typing import Any

from transformer.interop import llama, rope
from transformer.interop.common import INV_FREQ, QK_NORM, Family, gated, pattern, projection, sizes, write_pattern
from transformer.interop.keys import Keys
from transformer.model.attention import Attention
from transformer.model.config import Model
from transformer.model.norms import RmsNorm


def read(keys: Keys, three: bool = False) -> Model:
    own = sizes(keys)
    if three and not keys.has("head_dim"):
        own["head_width"] = None if 128 * own["heads"] == own["width"] else 128
    window = keys.take("sliding_window") if keys.flag("use_sliding_window", False) else None
    keys.take("sliding_window")
    before = keys.whole("max_window_layers", 28) if window is not None and not keys.has("layer_types") else 0
    sees_all = [window is None or i < before for i in range(own["depth"])]
    bias = "qkv" if not three else "all" if keys.flag("attention_bias", False) else "as_model"
    return Model(
        **own,
        attention=Attention(
            projection=projection(keys),
            span=pattern(keys, sees_all, None if window is None else keys.whole("sliding_window")),
            qk_norm="head" if three else "none",
            bias=bias,  # type: ignore[arg-type]
        ),
        positions=rope.read(keys, own["head_width"] or own["width"] // own["heads"]),
        norm=RmsNorm(epsilon=keys.number("rms_norm_eps", 1e-6)),
        mlp=gated(keys, "hidden_act"),
        tie_embeddings=keys.flag("tie_word_embeddings", False),
    )


def write(m: Model) -> dict[str, Any]:
    own = llama.write(m) | write_pattern(m)
    del own["attention_bias"], own["mlp_bias"], own["head_dim"]
    return own | {"use_sliding_window": own["sliding_window"] is not None}


def read_three(keys: Keys) -> Model:
    return read(keys, three=True)


def write_three(m: Model) -> dict[str, Any]:
    return write(m) | {"head_dim": m.head_size, "attention_bias": m.attention.biased(m.bias)[0]}


FAMILY = Family("qwen2", "Qwen2ForCausalLM", "model.", read, write, llama.ENTRIES, INV_FREQ)
QWEN3 = Family("qwen3", "Qwen3ForCausalLM", "model.", read_three, write_three, (*llama.ENTRIES, *QK_NORM), INV_FREQ)
