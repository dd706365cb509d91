"""The forward pass once more: NumPy, float64, one document, one head and one query at a time.

Written from the papers and not from the library, so that both agree only if both are right. It knows
the library's names of weights and nothing else of it. A document stands alone here: it knows nothing of
the row it was packed into, so agreement also says that packing isolates documents.

    blocks, norms       arXiv:1706.03762 (3.1), pre-norm as in arXiv:2002.04745; arXiv:1607.06450; arXiv:1910.07467
    attention           arXiv:1706.03762 (3.2), arXiv:1911.02150, arXiv:2305.13245
    positions           arXiv:1706.03762 (3.5), arXiv:2104.09864 as products of complex numbers
    MLP                 arXiv:1606.08415 (tanh form), arXiv:2002.05202
"""

import math
from typing import Any

import numpy as np


def row_logits(model: Any, params: Any, tokens: np.ndarray, segments: np.ndarray) -> np.ndarray:
    """Logits [T, V] of a packed row; not-a-number where there is padding, which nothing is promised of."""
    vocab = params["embedding"].shape[0]
    out = np.full((len(tokens), vocab), np.nan)
    for segment in sorted(set(segments.tolist()) - {0}):
        inside = np.flatnonzero(segments == segment)
        out[inside] = document_logits(model, params, tokens[inside])
    return out


def document_logits(model: Any, params: Any, ids: np.ndarray) -> np.ndarray:
    p = _float64(params)
    places = np.arange(len(ids))
    stream = [p["embedding"][i].copy() for i in ids]
    kind = type(model.positions).__name__
    for t in places:
        if kind == "Learned":
            stream[t] += p["positions"]["table"][t]
        elif kind == "Sinusoidal":
            stream[t] += _waves(t, model.width, model.positions.base) * model.init_std
    for layer in range(model.depth):
        block = _layer(p["blocks"], layer)
        normed = [_norm(model, block["attention_norm"], x) for x in stream]
        stream = [x + a for x, a in zip(stream, _attention(model, block["attention"], normed), strict=True)]
        stream = [x + _mlp(model, block["mlp"], _norm(model, block["mlp_norm"], x)) for x in stream]
    table = p["embedding"] if model.tie_embeddings else p["unembedding"]
    return np.array([table @ (_norm(model, p["final_norm"], x) if model.final_norm else x) for x in stream])


def _attention(model: Any, w: Any, xs: list[np.ndarray]) -> list[np.ndarray]:
    heads, size = w["query"]["w"].shape[1:]
    kv_heads = {"MultiHead": heads, "MultiQuery": 1}.get(type(model.attention.projection).__name__)
    if kv_heads is None:
        kv_heads = model.attention.projection.kv_heads
    assert w["key"]["w"].shape[1] == w["value"]["w"].shape[1] == kv_heads
    results = []
    for t in range(len(xs)):
        total = np.zeros(model.width)
        for head in range(heads):
            shared = head * kv_heads // heads  # heads 0 to G-1 share the first key/value head, and so on
            query = _turned(model, _product(w["query"], xs[t], head), t)
            scores, values = [], []
            for s in range(t + 1):
                key = _turned(model, _product(w["key"], xs[s], shared), s)
                scores.append(float(query @ key) / math.sqrt(size))
                values.append(_product(w["value"], xs[s], shared))
            shares = [math.exp(score - max(scores)) for score in scores]
            mixed = sum(share / sum(shares) * value for share, value in zip(shares, values, strict=True))
            total += mixed @ w["out"]["w"][head]
        results.append(total + w["out"].get("b", 0.0))
    return results


def _product(w: Any, x: np.ndarray, head: int) -> np.ndarray:
    bias = w["b"][head] if "b" in w else 0.0
    return x @ w["w"][:, head] + bias


def _turned(model: Any, x: np.ndarray, place: int) -> np.ndarray:
    if type(model.positions).__name__ != "Rotary":
        return x
    half = len(x) // 2
    pairs = x[:half] + 1j * x[half:]
    speeds = np.array([model.positions.base ** (-2 * i / len(x)) for i in range(half)])
    pairs = pairs * np.exp(1j * place * speeds)
    return np.concatenate([pairs.real, pairs.imag])


def _waves(place: int, width: int, base: float) -> np.ndarray:
    """All sines first, then all cosines (the paper has them in turn: another order of the same features)."""
    turns = [place / base ** (2 * i / width) for i in range(width // 2)]
    return np.array([math.sin(a) for a in turns] + [math.cos(a) for a in turns])


def _mlp(model: Any, w: Any, x: np.ndarray) -> np.ndarray:
    up = x @ w["up"]["w"] + w["up"].get("b", 0.0)
    if type(model.mlp).__name__ == "Swiglu":
        gate = x @ w["gate"]["w"] + w["gate"].get("b", 0.0)
        hidden = gate / (1 + np.exp(-gate)) * up
    else:
        hidden = 0.5 * up * (1 + np.tanh(math.sqrt(2 / math.pi) * (up + 0.044715 * up**3)))
    return hidden @ w["down"]["w"] + w["down"].get("b", 0.0)


def _norm(model: Any, w: Any, x: np.ndarray) -> np.ndarray:
    if type(model.norm).__name__ == "LayerNorm":
        x = x - sum(x) / len(x)
    size = sum(v * v for v in x) / len(x)
    return x / math.sqrt(size + model.norm.epsilon) * w["scale"] + w.get("b", 0.0)


def _layer(tree: Any, layer: int) -> Any:
    return {k: _layer(v, layer) if isinstance(v, dict) else v[layer] for k, v in tree.items()}


def _float64(tree: Any) -> Any:
    return {k: _float64(v) if isinstance(v, dict) else np.asarray(v, np.float64) for k, v in tree.items()}
