"""The forward pass once more: NumPy, float64, one document, one head and one query at a time.

Written from the papers and not from the library, so that both agree only if both are right. It knows
the library's names of weights and nothing else of it. A document stands alone here: it knows nothing of
the row it was packed into, so agreement also says that packing isolates documents.

    blocks, norms       arXiv:1706.03762 (3.1), pre-norm as in arXiv:2002.04745; arXiv:1607.06450; arXiv:1910.07467
    attention           arXiv:1706.03762 (3.2), arXiv:1911.02150, arXiv:2305.13245
    positions           arXiv:1706.03762 (3.5), arXiv:2104.09864 as products of complex numbers
    spans, scores       arXiv:2004.05150, arXiv:1904.10509; arXiv:2408.00118, arXiv:2409.04431, arXiv:2302.05442
    distances           arXiv:2108.12409, arXiv:1910.10683
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
    stream = [p["embedding"][i].copy() for i in ids]
    kind = type(model.positions).__name__
    for t in places:
        if kind == "Learned":
            stream[t] += p["positions"]["table"][t]
        elif kind == "Sinusoidal":
            stream[t] += _waves(t, model.width, model.positions.base) * model.init_std
    if model.norms == "peri":
        stream = [_norm(model, p["embedding_norm"], x) for x in stream]
    seen.streams.append(np.array(stream))
    for layer in list(range(model.depth)) * model.loops:
        stream = _block(model, _layer(p["blocks"], layer), layer, stream, seen)
        seen.streams.append(np.array(stream))
    seen.said += [_said(model, p, x) for x in seen.streams]
    return seen.said[-1]


def _said(model: Any, p: Any, stream: np.ndarray) -> np.ndarray:
    """The logits of a stream."""
    table = p["embedding"] if model.tie_embeddings else p["unembedding"]
    logits = np.array([table @ (_norm(model, p["final_norm"], x) if model.final_norm else x) for x in stream])
    cap = model.logits_soft_cap
    return logits if cap is None else cap * np.tanh(logits / cap)


def _block(model: Any, w: Any, layer: int, stream: list[np.ndarray], seen: Seen) -> list[np.ndarray]:
    def attention(xs: list[np.ndarray]) -> list[np.ndarray]:
        seen.weights.append(np.zeros((model.heads, len(xs), len(xs))))
        return _attention(model, w["attention"], xs, layer, seen.weights[-1])

    def mlp(xs: list[np.ndarray]) -> list[np.ndarray]:
        return [_mlp(model, w["mlp"], x) for x in xs]

    def normed(name: str, xs: list[np.ndarray]) -> list[np.ndarray]:
        return [_norm(model, w[name], x) for x in xs]

    def both(xs: list[np.ndarray], ys: list[np.ndarray]) -> list[np.ndarray]:
        return [x + y for x, y in zip(xs, ys, strict=True)]

    if model.norms == "post":
        stream = normed("attention_norm", both(stream, attention(stream)))
        return normed("mlp_norm", both(stream, mlp(stream)))
    first = attention(normed("attention_norm", stream))
    if model.norms != "pre":
        first = normed("attention_norm_after", first)
    middle = both(stream, first)
    second = mlp(normed("mlp_norm", stream if model.parallel else middle))
    if model.norms != "pre":
        second = normed("mlp_norm_after", second)
    return both(middle, second)


def _sees(span: Any, layer: int, t: int, s: int) -> bool:
    if type(span).__name__ == "Pattern":
        if span.blocks[layer % len(span.blocks)] == "global":
            return s <= t
        span = span.local
    name = type(span).__name__.lower()
    if name == "sliding":
        return t - span.window < s <= t
    if name == "chunked":
        return s <= t and s // span.chunk == t // span.chunk
    return s <= t


def _attention(model: Any, w: Any, xs: list[np.ndarray], layer: int, seen: np.ndarray) -> list[np.ndarray]:
    a = model.attention
    heads, size = w["query"]["w"].shape[1:]
    kv_heads = {"MultiHead": heads, "MultiQuery": 1}.get(type(a.projection).__name__)
    if kv_heads is None:
        kv_heads = a.projection.kv_heads
    assert w["key"]["w"].shape[1] == w["value"]["w"].shape[1] == kv_heads
    everything = type(a.span).__name__ == "Pattern" and a.span.blocks[layer % len(a.span.blocks)] == "global"
    turns = type(model.positions).__name__ == "Rotary" and not (everything and not a.span.rotate_global)

    def projected(name: str, norm: str, count: int) -> list[np.ndarray]:
        found = []
        for t, x in enumerate(xs):
            rows = np.array([_product(w[name], x, head) for head in range(count)])
            if a.qk_norm == "head":
                rows = np.array([_rms(model, row) * w[norm]["scale"] for row in rows])
            elif a.qk_norm == "width":
                rows = _rms(model, rows.reshape(-1)).reshape(rows.shape) * w[norm]["scale"]
            found.append(np.array([_turned(model, row, t) if turns else row for row in rows]))
        return found

    queries, keys = projected("query", "query_norm", heads), projected("key", "key_norm", kv_heads)
    results = []
    for t in range(len(xs)):
        total = np.zeros(model.width)
        for head in range(heads):
            shared = head * kv_heads // heads  # heads 0 to G-1 share the first key/value head, and so on
            scores, values = [], []
            for s in range(len(xs)):
                if not _sees(a.span, layer, t, s):
                    continue
                score = float(queries[t][head] @ keys[s][shared]) / math.sqrt(size)
                if a.scores.soft_cap is not None:
                    score = a.scores.soft_cap * math.tanh(score / a.scores.soft_cap)
                if type(model.positions).__name__ == "Alibi":
                    score -= _slopes(heads)[head] * (t - s)
                if type(model.positions).__name__ == "Relative":
                    number = _bucket(t - s, model.positions.buckets, model.positions.farthest)
                    score += w["distances"].reshape(model.positions.buckets, heads)[number, head]
                scores.append(score)
                values.append(_product(w["value"], xs[s], shared))
            if type(a.scores).__name__ == "Sigmoid":
                bias = -math.log(model.context) if a.scores.bias is None else a.scores.bias
                shares = [1 / (1 + math.exp(-score - bias)) for score in scores]
            else:
                sink = [w["sinks"].reshape(-1)[head]] if a.scores.sinks else []
                whole = sum(math.exp(score) for score in scores + sink)
                shares = [math.exp(score) / whole for score in scores]
            seen[head, t, [s for s in range(len(xs)) if _sees(a.span, layer, t, s)]] = shares
            mixed = sum(share * value for share, value in zip(shares, values, strict=True))
            if a.gate:
                mixed = mixed / (1 + np.exp(-_product(w["gate"], xs[t], head)))
            total += mixed @ w["out"]["w"][head]
        results.append(total + w["out"].get("b", 0.0))
    return results


def _slopes(heads: int) -> list[float]:
    """The paper's footnote: a geometric sequence for powers of two; else filled up from that of twice as many heads."""

    def sequence(n: int) -> list[float]:
        start = 2 ** (-(2 ** -(math.log2(n) - 3)))
        return [start * start**i for i in range(n)]

    if math.log2(heads).is_integer():
        return sequence(heads)
    closest = 2 ** math.floor(math.log2(heads))
    return sequence(closest) + sequence(2 * closest)[0::2][: heads - closest]


def _bucket(distance: int, buckets: int, farthest: int) -> int:
    exact = buckets // 2
    if distance < exact:
        return distance
    share = math.log(distance / exact) / math.log(farthest / exact)
    return min(buckets - 1, exact + int(share * (buckets - exact)))


def _product(w: Any, x: np.ndarray, head: int) -> np.ndarray:
    bias = w["b"][head] if "b" in w else 0.0
    return x @ w["w"][:, head] + bias


def _rms(model: Any, x: np.ndarray) -> np.ndarray:
    return x / math.sqrt(sum(v * v for v in x) / len(x) + model.norm.epsilon)


def _turned(model: Any, x: np.ndarray, place: int) -> np.ndarray:
    rotary = model.positions
    features = round(len(x) * rotary.share)
    half = features // 2
    pairs = x[:half] + 1j * x[half:features]
    speeds = [_speed(rotary, i, features) for i in range(half)]
    pairs = pairs * np.exp(1j * place * np.array(speeds)) * _sharper(rotary.scaling)
    return np.concatenate([pairs.real, pairs.imag, x[features:]])


def _sharper(scaling: Any) -> float:
    return 0.1 * math.log(scaling.factor) + 1 if type(scaling).__name__ == "Yarn" and scaling.sharpen else 1.0


def _speed(rotary: Any, i: int, features: int) -> float:
    """Radians from one position to the next of pair ``i``: arXiv:2306.15595, arXiv:2309.00071, Llama 3.1."""
    scaling, base = rotary.scaling, rotary.base
    kind, speed = type(scaling).__name__, base ** (-2 * i / features)
    length = 2 * math.pi / speed
    if kind == "Linear":
        return speed / scaling.factor
    if kind == "Ntk":
        return (base * scaling.factor ** (features / (features - 2))) ** (-2 * i / features)
    if kind == "Llama3":
        if length < scaling.original_context / scaling.high:
            return speed
        if length > scaling.original_context / scaling.low:
            return speed / scaling.factor
        smooth = (scaling.original_context / length - scaling.low) / (scaling.high - scaling.low)
        return (1 - smooth) * speed / scaling.factor + smooth * speed
    if kind == "Yarn":

        def place(turns: float) -> float:
            return features * math.log(scaling.original_context / (turns * 2 * math.pi)) / (2 * math.log(base))

        low = max(math.floor(place(scaling.fast)), 0)
        high = min(math.ceil(place(scaling.slow)), features - 1)
        ramp = min(max((i - low) / ((high - low) or 0.001), 0.0), 1.0)
        return speed / scaling.factor * ramp + speed * (1 - ramp)
    return speed


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
