"""GPT-2. Its matrices are [inputs, outputs] (Conv1D), query, key and value side by side."""

from typing import Any

from transformer.interop.common import EMBEDDING, HEAD, Family, activation, plain
from transformer.interop.keys import Keys
from transformer.interop.layouts import Entry, norm
from transformer.model.config import Model
from transformer.model.norms import LayerNorm


def read(keys: Keys) -> Model:
    keys.must_be("scale_attn_weights", True)
    keys.must_be("scale_attn_by_inverse_layer_idx", False)
    keys.must_be("add_cross_attention", False)
    width = keys.whole("n_embd", 768)
    return Model(
        depth=keys.whole("n_layer", 12),
        width=width,
        heads=keys.whole("n_head", 12),
        context=keys.whole("n_positions", 1024),
        norm=LayerNorm(epsilon=keys.number("layer_norm_epsilon", 1e-5)),
        mlp=plain(keys, "activation_function", "gelu_new", keys.whole("n_inner", 4 * width)),
        bias=True,
        tie_embeddings=keys.flag("tie_word_embeddings", True),
    )


def write(m: Model) -> dict[str, Any]:
    return {
        "n_layer": m.depth,
        "n_embd": m.width,
        "n_head": m.heads,
        "n_positions": m.context,
        "scale_attn_weights": True,
        "n_inner": m.mlp.hidden(m.width),
        "layer_norm_epsilon": m.norm.epsilon,
        "activation_function": activation(m, "gelu_new"),
        "tie_word_embeddings": m.tie_embeddings,
    }


def conv1d(theirs: str, *ours: str) -> tuple[Entry, Entry]:
    return (
        Entry(f"{theirs}.weight", tuple(f"{name}/w" for name in ours)),
        Entry(f"{theirs}.bias", tuple(f"{name}/b" for name in ours)),
    )


BLOCK = "transformer.h.{i}"
FAMILY = Family(
    name="gpt2",
    architecture="GPT2LMHeadModel",
    prefix="transformer.",
    read=read,
    write=write,
    entries=(
        Entry("transformer.wte.weight", (EMBEDDING,)),
        Entry("transformer.wpe.weight", ("positions/table",)),
        *norm(f"{BLOCK}.ln_1", "attention_norm"),
        *conv1d(f"{BLOCK}.attn.c_attn", "attention/query", "attention/key", "attention/value"),
        *conv1d(f"{BLOCK}.attn.c_proj", "attention/out"),
        *norm(f"{BLOCK}.ln_2", "mlp_norm"),
        *conv1d(f"{BLOCK}.mlp.c_fc", "mlp/up"),
        *conv1d(f"{BLOCK}.mlp.c_proj", "mlp/down"),
        *norm("transformer.ln_f", "final_norm"),
        Entry("lm_head.weight", (HEAD,)),
    ),
    buffers=r"transformer\.h\.\d+\.attn\.(bias|masked_bias)",  # the causal mask
)
