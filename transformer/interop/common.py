"""What families share: sizes, spans, activations, and the table of names that came with Llama."""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from transformer.interop.keys import Keys
from transformer.interop.layouts import Entry, linear, norm
from transformer.model.config import Model
from transformer.model.grouped import Grouped, MultiHead, MultiQuery
from transformer.model.mlp import Geglu, Gelu, Swiglu
from transformer.model.spans import Global, Pattern, Sliding, of_block


class Family(NamedTuple):
    """A family of published models: settings both ways and the table of names.

    ``read`` makes a model of a config.json and refuses what is not here; ``write`` is its inverse where the model has a
    home in the family: what comes back other than it was is what has none. ``prefix`` is what some files leave out.
    """

    name: str  # model_type
    architecture: str
    prefix: str
    read: Callable[[Keys], Model]
    write: Callable[[Model], dict[str, Any]]
    entries: tuple[Entry, ...]
    buffers: str = r"$^"  # names of tensors that hold no weights, as a regular expression


EMBEDDING, HEAD = "embedding", "unembedding"


def sizes(keys: Keys) -> dict[str, Any]:
    """Depth, width, heads, head width and context, as keywords of Model."""
    width, heads = keys.whole("hidden_size"), keys.whole("num_attention_heads")
    head = keys.whole("head_dim", max(1, width // heads))
    return {
        "depth": keys.whole("num_hidden_layers"),
        "width": width,
        "heads": heads,
        "head_width": None if head * heads == width else head,
        "context": keys.whole("max_position_embeddings"),
    }


def write_sizes(m: Model) -> dict[str, Any]:
    kv = m.attention.projection.kv_count(m.heads) if hasattr(m.attention.projection, "kv_count") else m.heads
    return {
        "hidden_size": m.width,
        "num_attention_heads": m.heads,
        "num_key_value_heads": kv,
        "num_hidden_layers": m.depth,
        "max_position_embeddings": m.context,
        "intermediate_size": m.mlp.hidden(m.width),
    }


def projection(keys: Keys) -> MultiHead | MultiQuery | Grouped:
    heads = keys.whole("num_attention_heads")
    kv = keys.whole("num_key_value_heads", heads)
    return MultiHead() if kv == heads else MultiQuery() if kv == 1 else Grouped(kv_heads=kv)


def pattern(keys: Keys, sees_all: list[bool], window: int | None) -> Global | Sliding | Pattern:
    """The span of blocks of which some see everything and the others a window."""
    types = keys.take("layer_types")
    if types is not None:
        names = {"full_attention": True, "sliding_attention": False}
        if not isinstance(types, list) or len(types) != len(sees_all) or any(t not in names for t in types):
            raise keys.refuse("layer_types", f"wanted {len(sees_all)} of {' or '.join(names)}")
        sees_all = [names[t] for t in types]
    if all(sees_all):
        return Global()
    if window is None:
        raise keys.refuse("sliding_window", "blocks are to see a window, and there is none")
    if not any(sees_all):
        return Sliding(window=window)
    return Pattern(blocks=repeated(sees_all), local=Sliding(window=window))


def repeated(is_global: list[bool]) -> tuple[Literal["local", "global"], ...]:
    """The shortest pattern of blocks that gives this over the depth."""
    n = len(is_global)
    p = next(p for p in range(1, n + 1) if all(is_global[i] == is_global[i % p] for i in range(n)))
    return tuple("global" if s else "local" for s in is_global[:p])


def write_pattern(m: Model) -> dict[str, Any]:
    """layer_types and sliding_window."""
    spans = [of_block(m.attention.span, i) for i in range(m.depth)]
    windows = [span.window for span in spans if isinstance(span, Sliding)]
    types = ["sliding_attention" if isinstance(span, Sliding) else "full_attention" for span in spans]
    return {"layer_types": types, "sliding_window": windows[0] if windows else None}


TANH = ("gelu_new", "gelu_pytorch_tanh", "gelu_fast")


def gated(keys: Keys, name: str, usual: str = "silu", exact: bool = True) -> Swiglu | Geglu:
    """``exact``: whether "gelu" means that, and not its tanh form."""
    width, act = keys.whole("intermediate_size"), keys.text(name, usual)
    if act in ("silu", "swish"):
        return Swiglu(width=width)
    if act not in (*TANH, "gelu"):
        raise keys.refuse(name, "there are silu and gelu here")
    return Geglu(width=width, exact=exact and act == "gelu")


def plain(keys: Keys, name: str, usual: str, width: int | None) -> Gelu:
    act = keys.text(name, usual)
    if act not in (*TANH, "gelu"):
        raise keys.refuse(name, "there is gelu alone here")
    return Gelu(width=width, exact=act == "gelu")


def activation(m: Model, tanh: str = "gelu_pytorch_tanh") -> str:
    return "silu" if isinstance(m.mlp, Swiglu) else "gelu" if getattr(m.mlp, "exact", True) else tanh


LAYER = "model.layers.{i}"
ATTENTION = (
    *linear(f"{LAYER}.self_attn.q_proj", "attention/query"),
    *linear(f"{LAYER}.self_attn.k_proj", "attention/key"),
    *linear(f"{LAYER}.self_attn.v_proj", "attention/value"),
)
QK_NORM = (
    Entry(f"{LAYER}.self_attn.q_norm.weight", ("attention/query_norm/scale",)),
    Entry(f"{LAYER}.self_attn.k_norm.weight", ("attention/key_norm/scale",)),
)
OUT = linear(f"{LAYER}.self_attn.o_proj", "attention/out")
WIDEN = (*linear(f"{LAYER}.mlp.gate_proj", "mlp/gate"), *linear(f"{LAYER}.mlp.up_proj", "mlp/up"))
DOWN = linear(f"{LAYER}.mlp.down_proj", "mlp/down")
ENDS = (
    Entry("model.embed_tokens.weight", (EMBEDDING,)),
    *norm("model.norm", "final_norm"),
    Entry("lm_head.weight", (HEAD,)),
)
PRE_NORMS = (
    *norm(f"{LAYER}.input_layernorm", "attention_norm"),
    *norm(f"{LAYER}.post_attention_layernorm", "mlp_norm"),
)
FOUR_NORMS = (
    *norm(f"{LAYER}.input_layernorm", "attention_norm"),
    *norm(f"{LAYER}.post_attention_layernorm", "attention_norm_after"),
    *norm(f"{LAYER}.pre_feedforward_layernorm", "mlp_norm"),
    *norm(f"{LAYER}.post_feedforward_layernorm", "mlp_norm_after"),
)
INV_FREQ = r".*rotary_emb\.inv_freq"  # rotary angles, which older files store
