"""Golden files: tiny random models of every family, with the logits that the field's own implementation gives.

    make golden

needs torch and transformers, which nothing else here does. Each folder of ``golden/`` is a Hugging Face directory with
logits.npz beside: ``ids`` [64] and the float32 ``logits`` [64, V] of them.
"""

import shutil
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np

GOLDEN = Path(__file__).parent / "golden"
VOCAB, LENGTH = 23, 64
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": LENGTH,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
YARN = {"factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 4.0, "beta_slow": 0.5}
FULL, SLIDING = "full_attention", "sliding_attention"


def rope(kind: str = "default", theta: float = 100.0, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": theta, **more}}


GPT2 = {"vocab_size": VOCAB, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": LENGTH}
GPT2 |= {"bos_token_id": 1, "eos_token_id": 2}
NEOX = {k: v for k, v in SIZES.items() if k != "num_key_value_heads"} | {"num_attention_heads": 2}
GEMMA = SIZES | {"head_dim": 6, **rope()}
GEMMA3 = GEMMA | {
    "num_hidden_layers": 3,
    "layer_types": [SLIDING, FULL, SLIDING],
    "sliding_window": 5,
    "query_pre_attn_scalar": 9,
    "rope_parameters": {
        FULL: {"rope_type": "linear", "factor": 2.0, "rope_theta": 300.0},
        SLIDING: {"rope_type": "default", "rope_theta": 30.0},
    },
}
# Class of the settings, and the settings. The names tell the options.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2", GPT2),
    "gpt2-untied-exact": ("GPT2", GPT2 | {"tie_word_embeddings": False, "activation_function": "gelu", "n_inner": 20}),
    "gpt_neox": ("GPTNeoX", NEOX | rope(partial_rotary_factor=0.5)),
    "gpt_neox-serial": (
        "GPTNeoX",
        NEOX
        | rope("linear", factor=2.0, partial_rotary_factor=1.0)
        | {
            "use_parallel_residual": False,
            "attention_bias": False,
            "hidden_act": "gelu_new",
            "tie_word_embeddings": True,
        },
    ),
    "llama": ("Llama", SIZES | rope()),
    "llama-tied-biases-llama3": (
        "Llama",
        SIZES | rope("llama3", **LLAMA3) | {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    ),
    "llama-wide-linear": (
        "Llama",
        SIZES | rope("linear", factor=4.0) | {"num_key_value_heads": 1, "head_dim": 6, "attention_bias": True},
    ),
    "llama-yarn": ("Llama", SIZES | rope("yarn", **YARN) | {"num_key_value_heads": 4, "mlp_bias": True}),
    "mistral": ("Mistral", SIZES | rope() | {"sliding_window": 7, "head_dim": 8}),
    "qwen2": ("Qwen2", SIZES | rope() | {"tie_word_embeddings": True}),
    "qwen2-window": (
        "Qwen2",
        SIZES
        | rope()
        | {"num_hidden_layers": 3, "use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3", SIZES | rope() | {"head_dim": 6}),
    "qwen3-biases": ("Qwen3", SIZES | rope() | {"head_dim": 4, "attention_bias": True, "tie_word_embeddings": True}),
    "gemma": ("Gemma", GEMMA | {"num_key_value_heads": 1}),
    "gemma2": (
        "Gemma2",
        GEMMA
        | {
            "sliding_window": 5,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 4.0,
            "query_pre_attn_scalar": 9,
        },
    ),
    "gemma3": ("Gemma3Text", GEMMA3),
    "gemma3-untied": ("Gemma3Text", GEMMA3 | {"tie_word_embeddings": False, "attention_bias": True}),
    "olmo2": ("Olmo2", SIZES | rope()),
    "phi3": ("Phi3", SIZES | rope(partial_rotary_factor=0.5) | {"sliding_window": 9}),
    "smollm3": ("SmolLM3", SIZES | rope() | {"num_hidden_layers": 5}),
    "smollm3-untied-biases": (
        "SmolLM3",
        SIZES
        | rope("yarn", **YARN)
        | {
            "num_hidden_layers": 3,
            "no_rope_layer_interval": 2,
            "tie_word_embeddings": False,
            "attention_bias": True,
            "mlp_bias": True,
            "head_dim": 6,
        },
    ),
    "phi3-tied": ("Phi3", SIZES | rope(partial_rotary_factor=1.0) | {"tie_word_embeddings": True}),
}
HALF = ("gpt2", "gpt_neox", "llama-yarn", "mistral", "qwen2-window", "gemma2", "gemma3-untied", "phi3")  # bfloat16
SHARDED = ("llama", "gemma3")


def model_of(transformers: Any, torch: Any, name: str) -> Any:
    """Random weights, every one away from where training would start: no zero bias, no scale of one."""
    kind, settings = MODELS[name]
    config = getattr(transformers, f"{kind}Config")(**settings)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    draw = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    with torch.no_grad():
        for path, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=draw)
            if weight.ndim == 1:
                centre = 0.0 if path.endswith("bias") or kind.startswith("Gemma") else 1.0
                weight.copy_(centre + 0.3 * noise)
            else:
                size = 1.0 if "embed" in path or "wte" in path or "wpe" in path else min(weight.shape) ** -0.5
                weight.copy_(size * noise)
            if name in HALF:
                weight.copy_(weight.to(torch.bfloat16).to(torch.float32))
    return model


def make(transformers: Any, torch: Any, name: str) -> None:
    model, folder = model_of(transformers, torch, name), GOLDEN / name
    ids = np.random.default_rng(zlib.crc32(name.encode())).integers(0, VOCAB, LENGTH)
    with torch.no_grad():
        logits = model(torch.tensor(ids[None])).logits[0].numpy()
    assert logits.dtype == np.float32 and np.isfinite(logits).all()
    shutil.rmtree(folder, ignore_errors=True)
    if name in HALF:
        model = model.to(torch.bfloat16)
    model.save_pretrained(folder, **({"max_shard_size": "6KB"} if name in SHARDED else {}))
    np.savez(folder / "logits.npz", ids=ids.astype(np.int32), logits=logits)
    print(f"{name}: largest logit {np.abs(logits).max():.2f}")


if __name__ == "__main__":
    import torch
    import transformers

    for name in sys.argv[1:] or MODELS:
        make(transformers, torch, name)
