"""Attention and norms of the oracle: NumPy, float64, one head and one query at a time.

norms               arXiv:1607.06450; arXiv:1910.07467
attention           arXiv:1706.03762 (3.2), arXiv:1911.02150, arXiv:2305.13245
                    arXiv:2405.04434, arXiv:2410.05258, arXiv:2312.06635, arXiv:2410.17897
rotary positions    arXiv:2104.09864 as products of complex numbers
spans, scores       arXiv:2004.05150, arXiv:1904.10509; arXiv:2408.00118, arXiv:2409.04431, arXiv:2302.05442
distances           arXiv:2108.12409, arXiv:1910.10683
"""

import math
from typing import Any

import numpy as np


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


def attention(model: Any, w: Any, xs: list[np.ndarray], layer: int, memo: dict[str, Any]) -> list[np.ndarray]:
    a = model.attention
    mix = KINDS.get(type(a.projection).__name__, _grouped)
    results = []
    for x, heads in zip(xs, mix(model, w, xs, layer, memo), strict=True):
        total = np.zeros(model.width)
        for head, mixed in enumerate(heads):
            if a.gate:
                mixed = mixed / (1 + np.exp(-_product(w["gate"], x, head)))
            total += mixed @ w["out"]["w"][head]
        results.append(total + w["out"].get("b", 0.0))
    return results


def _turns(model: Any, layer: int) -> tuple[bool, float | None]:
    """Whether a block's queries and keys are turned, and the base where it has one of its own."""
    span = model.attention.span
    pattern = type(span).__name__ == "Pattern"
    everything = pattern and span.blocks[layer % len(span.blocks)] == "global"
    turns = type(model.positions).__name__ == "Rotary" and not (everything and not span.rotate_global)
    return turns, span.local_base if pattern and not everything else None


def _placed(
    model: Any, w: Any, name: str, heads: list[np.ndarray], t: int, turns: tuple[bool, float | None]
) -> list[np.ndarray]:
    """Queries or keys of one position, normed and turned."""
    rows = np.array(heads)
    if model.attention.qk_norm == "head":
        rows = np.array([_rms(model, row) * _scale(model, w[name]) for row in rows])
    elif model.attention.qk_norm == "width":
        rows = _rms(model, rows.reshape(-1)).reshape(rows.shape) * _scale(model, w[name])
    return [_turned(model, row, t, turns[1]) if turns[0] else row for row in rows]


def _shares(model: Any, w: Any, layer: int, t: int, head: int, query: np.ndarray, keys: list[Any]) -> dict[int, float]:
    """By key position, its share in what a query mixes; ``keys`` are those of one head at all positions."""
    a, scores = model.attention, {}
    for s, key in enumerate(keys):
        if not _sees(a.span, layer, t, s):
            continue
        score = float(query @ key) / math.sqrt(a.score_width or len(query))
        if a.scores.soft_cap is not None:
            score = a.scores.soft_cap * math.tanh(score / a.scores.soft_cap)
        if type(model.positions).__name__ == "Alibi":
            score -= _slopes(model.heads)[head] * (t - s)
        if type(model.positions).__name__ == "Relative":
            number = _bucket(t - s, model.positions.buckets, model.positions.farthest)
            score += w["distances"].reshape(model.positions.buckets, model.heads)[number, head]
        scores[s] = score
    if type(a.scores).__name__ == "Sigmoid":
        bias = -math.log(model.context) if a.scores.bias is None else a.scores.bias
        return {s: 1 / (1 + math.exp(-score - bias)) for s, score in scores.items()}
    sink = [w["sinks"].reshape(-1)[head]] if a.scores.sinks else []
    whole = sum(math.exp(score) for score in [*scores.values(), *sink])
    return {s: math.exp(score) / whole for s, score in scores.items()}


def _values(model: Any, w: Any, xs: list[np.ndarray], memo: dict[str, Any]) -> list[np.ndarray]:
    """Of each position and head, mixed with those of the first block (arXiv:2410.17897)."""
    own = [np.array([_product(w["value"], x, head) for head in range(w["value"]["w"].shape[1])]) for x in xs]
    if model.attention.value_residual == "none" or "values" not in memo:
        memo["values"] = own
        return own
    first, second = w["value_shares"] / 2 if model.attention.value_residual == "learned" else (0.5, 0.5)
    return [first * a + second * b for a, b in zip(memo["values"], own, strict=True)]


def _grouped(model: Any, w: Any, xs: list[np.ndarray], layer: int, memo: dict[str, Any]) -> list[Any]:
    a, turns = model.attention, _turns(model, layer)
    heads = w["query"]["w"].shape[1]
    kv_heads = {"MultiHead": heads, "MultiQuery": 1}.get(type(a.projection).__name__)
    if kv_heads is None:
        kv_heads = a.projection.kv_heads
    assert w["key"]["w"].shape[1] == w["value"]["w"].shape[1] == kv_heads

    def projected(name: str, count: int) -> list[Any]:
        found = [[_product(w[name], x, head) for head in range(count)] for x in xs]
        return [_placed(model, w, f"{name}_norm", rows, t, turns) for t, rows in enumerate(found)]

    queries, keys, values = projected("query", heads), projected("key", kv_heads), _values(model, w, xs, memo)
    results = []
    for t in range(len(xs)):
        mixed = []
        for head in range(heads):
            shared = head * kv_heads // heads  # heads 0 to G-1 share the first key/value head, and so on
            shares = _shares(model, w, layer, t, head, queries[t][head], [k[shared] for k in keys])
            memo["weights"][head, t, list(shares)] = list(shares.values())
            mixed.append(sum(share * values[s][shared] for s, share in shares.items()))
        results.append(mixed)
    return results


def _latent(model: Any, w: Any, xs: list[np.ndarray], layer: int, memo: dict[str, Any]) -> list[Any]:
    """arXiv:2405.04434, equations 9 to 19, every key and value of every head written out."""
    own, size = model.attention.projection, model.width // model.heads if model.head_width is None else model.head_width
    rotary, (_, base) = type(model.positions).__name__ == "Rotary", _turns(model, layer)

    def shortened(name: str, x: np.ndarray, normed: bool) -> np.ndarray:
        y = x @ w[f"{name}_down"]["w"] + w[f"{name}_down"].get("b", 0.0)
        return norm(model, w[f"{name}_norm"], y) if normed else y

    latents = [shortened("key_value", x, own.norm) for x in xs]
    sources = [x if own.q_rank is None else shortened("query", x, own.norm) for x in xs]
    shared = [_turned(model, shortened("key_rotary", x, False), s, base) if rotary else [] for s, x in enumerate(xs)]
    results = []
    for t, source in enumerate(sources):
        mixed = []
        for head in range(model.heads):
            query = _product(w["query"], source, head)
            assert len(query) == size + (own.rope_width if rotary else 0)
            if rotary:
                query = np.concatenate([query[:size], _turned(model, query[size:], t, base)])
            keys = [np.concatenate([c @ w["key"][:, head], r]) for c, r in zip(latents, shared, strict=True)]
            shares = _shares(model, w, layer, t, head, query, keys)
            memo["weights"][head, t, list(shares)] = list(shares.values())
            mixed.append(sum(share * (latents[s] @ w["value"][:, head]) for s, share in shares.items()))
        results.append(mixed)
    return results


def _differential(model: Any, w: Any, xs: list[np.ndarray], layer: int, memo: dict[str, Any]) -> list[Any]:
    """arXiv:2410.05258, equations 1 to 3; blocks counted from 1 there, from 0 here."""
    turns, half = _turns(model, layer), w["query"]["w"].shape[2] // 2

    def halves(name: str) -> list[Any]:
        """Of each position: both halves of the first head, both of the second, ..."""
        found = []
        for t, x in enumerate(xs):
            rows = [_product(w[name], x, head) for head in range(model.heads)]
            parts = [part for row in rows for part in (row[:half], row[half:])]
            found.append(_placed(model, w, f"{name}_norm", parts, t, turns))
        return found

    queries, keys, values = halves("query"), halves("key"), _values(model, w, xs, memo)
    start = 0.8 - 0.6 * math.exp(-0.3 * layer)
    a1, b1, a2, b2 = w["lambda"]
    factor = math.exp(a1 @ b1) - math.exp(a2 @ b2) + start
    results = []
    for t in range(len(xs)):
        mixed = []
        for head in range(model.heads):
            total, taken = np.zeros(2 * half), np.zeros(len(xs))
            for part, times in ((2 * head, 1.0), (2 * head + 1, -factor)):
                shares = _shares(model, w, layer, t, head, queries[t][part], [k[part] for k in keys])
                total = total + times * sum(share * values[s][head] for s, share in shares.items())
                taken[list(shares)] += times * np.array(list(shares.values()))
            memo["weights"][head, t] = _proportions(taken)
            mixed.append((1 - start) * _rms(model, total) * _scale(model, w["norm"]))
        results.append(mixed)
    return results


def _linear(model: Any, w: Any, xs: list[np.ndarray], layer: int, memo: dict[str, Any]) -> list[Any]:
    """arXiv:2312.06635, equations 3 and 4, the decay one number: token by token, a state for each head."""
    size, turns, values = w["query"]["w"].shape[2], _turns(model, layer), _values(model, w, xs, memo)
    states = np.zeros((model.heads, size, size))
    left: list[list[np.ndarray]] = [[] for _ in range(model.heads)]  # what each key has become
    results = []
    for t, x in enumerate(xs):
        queries, keys = (
            _placed(model, w, f"{name}_norm", [_product(w[name], x, head) for head in range(model.heads)], t, turns)
            for name in ("query", "key")
        )
        mixed = []
        for head in range(model.heads):
            gate = _product(w["decay"], x, head)
            decay = (1 / (1 + math.exp(-gate))) ** (1 / model.attention.projection.slowness)
            states[head] = decay * states[head] + np.outer(keys[head], values[t][head])
            left[head] = [decay * key for key in left[head]] + [keys[head]]
            memo["weights"][head, t, : t + 1] = _proportions(np.array(left[head]) @ queries[head])
            mixed.append(_rms(model, queries[head] / math.sqrt(size) @ states[head]) * _scale(model, w["norm"]))
        results.append(mixed)
    return results


KINDS = {"Latent": _latent, "Differential": _differential, "Linear": _linear}


def _proportions(weights: np.ndarray) -> np.ndarray:
    """Of what is scaled afterwards only these count."""
    total = np.abs(weights).sum()
    return weights / total if total else weights


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


def _scale(model: Any, w: Any) -> np.ndarray:
    return w["scale"] + (1 if getattr(model.norm, "centered", False) else 0)


def _turned(model: Any, x: np.ndarray, place: int, base: float | None) -> np.ndarray:
    rotary = model.positions
    features = round(len(x) * rotary.share)
    half = features // 2
    pairs = x[:half] + 1j * x[half:features]
    speeds = [_speed(rotary, i, features) if base is None else base ** (-2 * i / features) for i in range(half)]
    pairs = pairs * np.exp(1j * place * np.array(speeds)) * (_sharper(rotary.scaling) if base is None else 1.0)
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


def norm(model: Any, w: Any, x: np.ndarray) -> np.ndarray:
    if type(model.norm).__name__ == "LayerNorm":
        x = x - sum(x) / len(x)
    size = sum(v * v for v in x) / len(x)
    return x / math.sqrt(size + model.norm.epsilon) * _scale(model, w) + w.get("b", 0.0)
