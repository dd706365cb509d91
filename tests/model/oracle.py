"""The forward pass once more: NumPy, float64, one document, one head and one query at a time.

Written from the papers and not from the library, so that both agree only if both are right. It knows
the library's names of weights and nothing else of it. A document stands alone here: it knows nothing of
the row it was packed into, so agreement also says that packing isolates documents.

    blocks              arXiv:1706.03762 (3.1), pre-norm as in arXiv:2002.04745
    positions           arXiv:1706.03762 (3.5)
    MLP                 arXiv:1606.08415 (tanh form), arXiv:2002.05202
    mixtures            arXiv:2101.03961 (eq. 1, 2, 4), arXiv:2401.06066 (eq. 3), arXiv:2202.08906 (eq. 5)
"""

import math
from typing import Any

import numpy as np

from tests.model.oracle_attention import attention as mixed
from tests.model.oracle_attention import norm


def row_logits(model: Any, params: Any, tokens: np.ndarray, segments: np.ndarray) -> np.ndarray:
    """Logits [T, V] of a packed row; not-a-number where there is padding, which nothing is promised of."""
    vocab = params["embedding"].shape[0]
    out = np.full((len(tokens), vocab), np.nan)
    for segment in sorted(set(segments.tolist()) - {0}):
        inside = np.flatnonzero(segments == segment)
        out[inside] = document_logits(model, params, tokens[inside])
    return out


class Seen:
    """What passed on the way: the stream before the first block and behind each, and each block's attention weights."""

    def __init__(self) -> None:
        self.streams: list[np.ndarray] = []
        self.weights: list[np.ndarray] = []  # [N, T, S]
        self.said: list[np.ndarray] = []  # logits [T, V] of each of the streams


def document_logits(model: Any, params: Any, ids: np.ndarray, seen: Seen | None = None) -> np.ndarray:
    p = _float64(params)
    seen = seen or Seen()
    places = np.arange(len(ids))
    stream = [p["embedding"][i] * (math.sqrt(model.width) if model.scale_embedding else 1) for i in ids]
    kind = type(model.positions).__name__
    for t in places:
        if kind == "Learned":
            stream[t] += p["positions"]["table"][t]
        elif kind == "Sinusoidal":
            stream[t] += _waves(t, model.width, model.positions.base) * model.init_std
    if model.norms == "peri":
        stream = [norm(model, p["embedding_norm"], x) for x in stream]
    memo: dict[str, Any] = {}  # what blocks leave for those after them
    seen.streams.append(np.array(stream))
    for layer in list(range(model.depth)) * model.loops:
        memo["weights"] = np.zeros((model.heads, len(ids), len(ids)))
        stream = _block(model, _layer(p["blocks"], layer), layer, stream, memo)
        seen.streams.append(np.array(stream))
        seen.weights.append(memo["weights"])
    seen.said += [_said(model, p, x) for x in seen.streams]
    return seen.said[-1]


def _said(model: Any, p: Any, stream: np.ndarray) -> np.ndarray:
    """The logits of a stream."""
    table = p["embedding"] if model.tie_embeddings else p["unembedding"]
    logits = np.array([table @ (norm(model, p["final_norm"], x) if model.final_norm else x) for x in stream])
    cap = model.logits_soft_cap
    return logits if cap is None else cap * np.tanh(logits / cap)


def _block(model: Any, w: Any, layer: int, stream: list[np.ndarray], memo: dict[str, Any]) -> list[np.ndarray]:
    def attention(xs: list[np.ndarray]) -> list[np.ndarray]:
        return mixed(model, w["attention"], xs, layer, memo)

    def mlp(xs: list[np.ndarray]) -> list[np.ndarray]:
        return [_mlp(model, w["mlp"], x) for x in xs]

    def normed(name: str, xs: list[np.ndarray]) -> list[np.ndarray]:
        return [norm(model, w[name], x) for x in xs]

    def both(xs: list[np.ndarray], ys: list[np.ndarray]) -> list[np.ndarray]:
        return [x + y for x, y in zip(xs, ys, strict=True)]

    if model.norms == "post":
        stream = normed("attention_norm", both(stream, attention(stream)))
        return normed("mlp_norm", both(stream, mlp(stream)))
    if model.norms == "after":
        first = normed("attention_norm_after", attention(stream))
        middle = both(stream, first)
        return both(middle, normed("mlp_norm_after", mlp(stream if model.parallel else middle)))
    first = attention(normed("attention_norm", stream))
    if model.norms != "pre":
        first = normed("attention_norm_after", first)
    middle = both(stream, first)
    second = mlp(normed("mlp_norm", stream if model.parallel else middle))
    if model.norms != "pre":
        second = normed("mlp_norm_after", second)
    return both(middle, second)


def _waves(place: int, width: int, base: float) -> np.ndarray:
    """All sines first, then all cosines (the paper has them in turn: another order of the same features)."""
    turns = [place / base ** (2 * i / width) for i in range(width // 2)]
    return np.array([math.sin(a) for a in turns] + [math.cos(a) for a in turns])


def _mlp(model: Any, w: Any, x: np.ndarray) -> np.ndarray:
    if type(model.mlp).__name__ == "Moe":
        return _mixture(model.mlp, w, x)
    up = x @ w["up"]["w"] + w["up"].get("b", 0.0)
    kind = type(model.mlp).__name__
    gate = up if kind == "Gelu" else x @ w["gate"]["w"] + w["gate"].get("b", 0.0)
    if kind == "Swiglu":
        hidden = gate / (1 + np.exp(-gate)) * up
    else:
        if model.mlp.exact:
            share = np.array([0.5 * (1 + math.erf(v / math.sqrt(2))) for v in gate])
        else:
            share = 0.5 * (1 + np.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)))
        hidden = gate * share * (1 if kind == "Gelu" else up)
    return hidden @ w["down"]["w"] + w["down"].get("b", 0.0)


def _mixture(moe: Any, w: Any, x: np.ndarray) -> np.ndarray:
    total = np.zeros_like(x)
    for expert, share in chosen(moe, _logits(w, x)).items():
        one = {name: {"w": w[name][expert], "b": w.get(f"{name}_b", np.zeros(moe.experts))[expert]} for name in _THREE}
        total += share * _gated(one, x)
    return total + _gated(w["shared"], x) if moe.shared else total


_THREE = ("gate", "up", "down")


def _logits(w: Any, x: np.ndarray) -> list[float]:
    return list(x @ w["router"]["w"] + w["router"].get("b", 0.0))


def _gated(w: Any, x: np.ndarray) -> np.ndarray:
    gate, up = (x @ w[name]["w"] + w[name].get("b", 0.0) for name in ("gate", "up"))
    return (gate / (1 + np.exp(-gate)) * up) @ w["down"]["w"] + w["down"].get("b", 0.0)


def scores(moe: Any, logits: list[float]) -> list[float]:
    if moe.scores == "sigmoid":
        return [1 / (1 + math.exp(-z)) for z in logits]
    return [math.exp(z) / sum(math.exp(other) for other in logits) for z in logits]


def chosen(moe: Any, logits: list[float]) -> dict[int, float]:
    """The experts that a token goes through, by number, with their weights."""
    found = scores(moe, logits)
    best = sorted(range(len(found)), key=lambda e: -found[e])[: moe.top_k]
    whole = sum(found[e] for e in best) if moe.normalise else 1.0
    return {e: found[e] / whole for e in best}


def balance(moe: Any, rows: list[list[list[float]]]) -> tuple[float, float, list[int]]:
    """From the router's logits of each counted token of each row: the load-balancing loss of a row times its tokens,
    summed; the squared log normalisers, summed; and how often each expert was chosen."""
    uneven, squares, counts = 0.0, 0.0, [0] * moe.experts
    for row in rows:
        fractions, shares = [0.0] * moe.experts, [0.0] * moe.experts
        for logits in row:
            found = scores(moe, logits)
            for e in chosen(moe, logits):
                fractions[e] += 1 / (moe.top_k * len(row))
                counts[e] += 1
            for e in range(moe.experts):
                shares[e] += found[e] / sum(found) / len(row)
            squares += math.log(sum(math.exp(z) for z in logits)) ** 2
        uneven += len(row) * moe.experts * sum(f * p for f, p in zip(fractions, shares, strict=True))
    return uneven, squares, counts


def _layer(tree: Any, layer: int) -> Any:
    return {k: _layer(v, layer) if isinstance(v, dict) else v[layer] for k, v in tree.items()}


def _float64(tree: Any) -> Any:
    return {k: _float64(v) if isinstance(v, dict) else np.asarray(v, np.float64) for k, v in tree.items()}
