"""GGUF files: their names and their metadata put into those of the family's Hugging Face checkpoints.

Two layouts differ. Llama files hold queries and keys for rotations of neighbours (0, 1), (2, 3), ...; ours rotate
halves. Gemma files hold norms with the one added.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from transformer.errors import UserError
from transformer.interop import gguf_rope, gguf_vocabulary, vocabulary
from transformer.interop.importing import Published

BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
AFTER = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
NAMES: dict[str, dict[str, str]] = {
    "llama": BLOCK,
    "qwen2": BLOCK,
    "qwen3": BLOCK,
    "gemma": BLOCK,
    "gemma2": BLOCK | AFTER | {"ffn_norm": "pre_feedforward_layernorm"},
    "gemma3": BLOCK | AFTER | {"ffn_norm": "pre_feedforward_layernorm"},
    "olmo2": BLOCK | AFTER,
    "phi3": BLOCK | {"ffn_up": "mlp.gate_up_proj"},
}
MODEL_TYPE = {"gemma3": "gemma3_text"}
ENDS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
# Their keys, after the architecture's name, and what a config.json calls them.
KEYS = {
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "context_length": "max_position_embeddings",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "rope.freq_base": "rope_theta",
}
SAME = ("attention.value_length", "rope.dimension_count", "vocab_size")  # checked against the others
KNOWN = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q4_K", "Q6_K")
Change = Callable[[np.ndarray], np.ndarray]


class Gguf:
    """The tensors of a GGUF file under the names of Hugging Face, dequantised to float32 when read."""

    def __init__(self, path: Path, reader: Any, names: dict[str, str], changed: dict[str, Change]):
        self.where, self._changed = str(path), changed
        self._tensors: dict[str, Any] = {}
        for tensor in reader.tensors:
            if tensor.name == gguf_rope.NAME:  # settings, and no weights
                continue
            if tensor.tensor_type.name not in KNOWN:
                raise UserError(f"{path}: {tensor.name} is {tensor.tensor_type.name}; there are {', '.join(KNOWN)}")
            name = their_name(tensor.name, names)
            if name is None or name in self._tensors:
                raise UserError(f"{path}: {tensor.name} is not known as a tensor of this architecture")
            self._tensors[name] = tensor
        self.shapes = {name: tuple(int(n) for n in t.shape[::-1]) for name, t in self._tensors.items()}

    def read(self, name: str) -> np.ndarray:
        from gguf.quants import dequantize

        tensor = self._tensors[name]
        found = np.asarray(dequantize(tensor.data, tensor.tensor_type), np.float32).reshape(self.shapes[name])
        for pattern, change in self._changed.items():
            found = change(found) if re.search(pattern, name) else found
        return found


def their_name(name: str, names: dict[str, str]) -> str | None:
    """blk.3.attn_q.weight -> model.layers.3.self_attn.q_proj.weight; None for a name that is not known."""
    stem, _, last = name.rpartition(".")
    if stem in ENDS:
        return f"{ENDS[stem]}.{last}"
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
    if match is None or match[2] not in names:
        return None
    return f"model.layers.{int(match[1])}.{names[match[2]]}.{last}"


def open_file(path: Path, tokenizer: Path | None) -> Published:
    """What a GGUF file holds. UserError for one that is damaged, or has what is not here."""
    try:
        import gguf
    except ImportError:
        raise UserError("--from: a GGUF file needs the package gguf, which is not installed (the extra gguf)") from None
    if not path.is_file():
        raise UserError(f"--from: there is no file {path}")
    try:
        reader = gguf.GGUFReader(path)
        fields = {name: field.contents() for name, field in reader.fields.items()}
    except Exception as error:  # the library raises what it meets
        raise UserError(f"{path}: cannot be read as GGUF: {type(error).__name__}: {error}") from error
    kind = fields.get("general.architecture")
    if kind not in NAMES:
        raise UserError(f"{path}: general.architecture={kind!r} is not known (there are: {', '.join(NAMES)})")
    config = config_of(path, str(kind), fields)
    config |= rope_scaling(path, str(kind), reader, config)
    source = Gguf(path, reader, NAMES[str(kind)], changes(str(kind), config))
    if "model.embed_tokens.weight" not in source.shapes:
        raise UserError(f"{path}: token_embd.weight is missing")
    config["vocab_size"] = source.shapes["model.embed_tokens.weight"][0]
    config["tie_word_embeddings"] = "lm_head.weight" not in source.shapes
    if tokenizer is not None:
        return Published(config, source, vocabulary.find(tokenizer, config))
    return Published(config, source, gguf_vocabulary.find(path, fields, config))


def config_of(path: Path, kind: str, fields: dict[str, Any]) -> dict[str, Any]:
    """The metadata as a config.json. UserError for a key that is not known."""
    config: dict[str, Any] = {"model_type": MODEL_TYPE.get(kind, kind)}
    scaling: dict[str, Any] = {}
    checked = {}
    for name, value in fields.items():
        key = name.removeprefix(f"{kind}.")
        if key == name:
            continue
        if key in KEYS:
            config[KEYS[key]] = value
        elif key in SAME:
            checked[key] = value
        elif key.startswith("rope.scaling.") and key.rpartition(".")[2] in SCALING:
            scaling[SCALING[key.rpartition(".")[2]]] = value
        else:
            raise UserError(f"{path}: {name}={value!r} is not known here: it may change the result")
    if scaling.get("rope_type", "none") != "none":
        config["rope_scaling"] = scaling
    config |= {
        "bos_token_id": fields.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": fields.get("tokenizer.ggml.eos_token_id"),
    }
    try:
        head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        if kind in ("gemma2", "gemma3"):  # not in the file: 27 billion weights have another, by their depth
            odd = {("gemma2", 46), ("gemma3", 62)}
            wide = config["hidden_size"] // config["num_attention_heads"]
            config["query_pre_attn_scalar"] = wide if (kind, config["num_hidden_layers"]) in odd else head
    except (KeyError, TypeError, ZeroDivisionError) as error:
        raise UserError(f"{path}: sizes are missing: {error}") from error
    wanted = {"attention.value_length": head, "rope.dimension_count": head, "vocab_size": None}
    for key, value in checked.items():
        if wanted[key] not in (None, value):
            raise UserError(f"{path}: {kind}.{key}={value!r} is not the heads' width of {head}, and that is not here")
    if kind == "qwen2":
        config.pop("head_dim", None)
    return config


def rope_scaling(path: Path, kind: str, reader: Any, config: dict[str, Any]) -> dict[str, Any]:
    """The scaling that a tensor of divisors stands for, as keys of a config.json."""
    found = [tensor for tensor in reader.tensors if tensor.name == gguf_rope.NAME]
    if not found:
        return {}
    if kind != "llama" or found[0].tensor_type.name != "F32" or "rope_scaling" in config:
        raise UserError(f"{path}: {gguf_rope.NAME} is known in float32, of llama, and without rope.scaling beside it")
    head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    divisors_H = np.asarray(found[0].data, np.float32)
    return {"rope_scaling": gguf_rope.scaling(str(path), divisors_H, head, config.get("rope_theta") or 10_000.0)}


SCALING = {"type": "rope_type", "factor": "factor", "original_context_length": "original_max_position_embeddings"}


def changes(kind: str, config: dict[str, Any]) -> dict[str, Change]:
    """What is to be done to tensors, by a pattern of their names."""

    def halves(key: str) -> Change:
        def turn(w: np.ndarray) -> np.ndarray:
            heads = int(config.get(key) or config["num_attention_heads"])
            apart = w.reshape(heads, w.shape[0] // heads // 2, 2, *w.shape[1:])
            return apart.swapaxes(1, 2).reshape(w.shape)

        return turn

    if kind == "llama":
        return {r"q_proj\.": halves("num_attention_heads"), r"k_proj\.": halves("num_key_value_heads")}
    return {r"norm\.weight$": lambda w: w - 1} if kind.startswith("gemma") else {}
