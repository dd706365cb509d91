"""GPT-NeoX and Pythia: branches side by side, part of each head rotated, query, key and value of a head together."""

from typing import Any

from transformer.interop import rope
from transformer.interop.common import EMBEDDING, HEAD, Family, activation, plain, sizes, write_sizes
from transformer.interop.keys import Keys
from transformer.interop.layouts import Entry, linear, norm
from transformer.model.attention import Attention
from transformer.model.config import Model
from transformer.model.norms import LayerNorm
from transformer.model.positions import Rotary


def read(keys: Keys) -> Model:
    own = sizes(keys)
    head = own["width"] // own["heads"]
    return Model(
        **own,
        attention=Attention(bias="as_model" if keys.flag("attention_bias", True) else "none"),
        positions=rope.read(keys, head, "rotary_emb_base", "rotary_pct", 0.25),
        norm=LayerNorm(epsilon=keys.number("layer_norm_eps", 1e-5)),
        parallel=keys.flag("use_parallel_residual", True),
        mlp=plain(keys, "hidden_act", "gelu", keys.whole("intermediate_size")),
        bias=True,
        tie_embeddings=keys.flag("tie_word_embeddings", False),
    )


def write(m: Model) -> dict[str, Any]:
    own = {k: v for k, v in write_sizes(m).items() if k != "num_key_value_heads"}
    rotary = m.positions if isinstance(m.positions, Rotary) else Rotary()
    return own | {
        "attention_bias": m.attention.bias != "none",
        "layer_norm_eps": m.norm.epsilon,
        "use_parallel_residual": m.parallel,
        "hidden_act": activation(m, "gelu_new"),
        "tie_word_embeddings": m.tie_embeddings,
        **rope.write(rotary, "rotary_emb_base", "rotary_pct"),
    }


BLOCK = "gpt_neox.layers.{i}"
FAMILY = Family(
    name="gpt_neox",
    architecture="GPTNeoXForCausalLM",
    prefix="gpt_neox.",
    read=read,
    write=write,
    entries=(
        Entry("gpt_neox.embed_in.weight", (EMBEDDING,)),
        *norm(f"{BLOCK}.input_layernorm", "attention_norm"),
        *norm(f"{BLOCK}.post_attention_layernorm", "mlp_norm"),
        *linear(
            f"{BLOCK}.attention.query_key_value", "attention/query", "attention/key", "attention/value", by_head=True
        ),
        *linear(f"{BLOCK}.attention.dense", "attention/out"),
        *linear(f"{BLOCK}.mlp.dense_h_to_4h", "mlp/up"),
        *linear(f"{BLOCK}.mlp.dense_4h_to_h", "mlp/down"),
        *norm("gpt_neox.final_layer_norm", "final_norm"),
        Entry("embed_out.weight", (HEAD,)),
    ),
    buffers=r"gpt_neox\.layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)",
)
