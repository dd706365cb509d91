"""What each part of a trained model is worth: bits per byte without it, on a fixed set of windows of text.

Each block, attention, MLP and head is taken out, neighbouring blocks change places, and the model is cut after block k.
One compiled program serves them all (`alter`). A difference is that of summed nats over summed bytes. Its interval
comes from drawing documents with replacement, the same for the whole model and the changed one (the paired bootstrap,
Koehn 2004); of fewer than FEW documents, from drawing windows, since so few documents say nothing of others.

Beside that, of each block: the norm of the loss's gradient by its weights, the length of the stream behind it and of
what its branches add; of each head: its previous-token score, the mean weight of the position before, on the same
text, and its induction score (arXiv:2209.11895), the mean weight of the position behind the current token's earlier
occurrence, in random tokens that are repeated once.

B rows, T query positions, S key positions, D model width, N heads, L blocks.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from transformer.analysis.alter import Change, altered, interfering, unchanged
from transformer.analysis.evaluate import Score, row_scores, spread, window_scores, windows
from transformer.analysis.watch import look
from transformer.config import Experiment
from transformer.data.documents import Documents, Encoded
from transformer.model.attention import reach
from transformer.model.transformer import Transformer
from transformer.parallel.rules import put

ABLATION = "ablation.json"
FEW = 20  # documents
RESAMPLES, SEED = 2000, 0
READ = 16  # windows whose stream and attention weights are looked at
LONGEST, REPEATED = 64, 8  # random tokens that are repeated, and how many such sequences


class Way(NamedTuple):
    """One change: ``kind`` of part, numbers from 1 of its block and head (None where it has none)."""

    kind: str  # block, attention, mlp, head: taken out; swap: with the block behind it; cut: blocks from here on go
    block: int
    head: int | None
    change: Change


def ways(depth: int, heads: int) -> list[Way]:
    """Every change that is made."""
    whole = unchanged(depth, heads)
    found = []
    for i in range(depth):
        found.append(Way("block", i + 1, None, whole.to(blocks_L=i)))
        found.append(Way("attention", i + 1, None, whole.to(attention_L=i)))
        found.append(Way("mlp", i + 1, None, whole.to(mlp_L=i)))
        found += [Way("head", i + 1, n + 1, whole.to(heads_LN=(i, n))) for n in range(heads)]
    for i in range(depth - 1):
        order = np.arange(depth)
        order[[i, i + 1]] = i + 1, i
        found.append(Way("swap", i + 1, None, whole._replace(order_L=order)))
    return found + [Way("cut", i + 1, None, whole.to(blocks_L=slice(i, None))) for i in range(depth)]


def ablate(
    experiment: Experiment,
    params: Any,
    documents: Documents | Encoded,
    token_bytes: np.ndarray,
    *,
    count: int | None,
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """All of the above on ``count`` windows, evenly spread over the documents (None: all)."""
    model = experiment.model
    how: Any = {"stride": max(1, model.context // 2), "count": count}

    def scores(change: Change) -> list[Any]:
        def score(_: Any, params: Any, *given: Any) -> Any:
            return _changed_rows(experiment.program, params, change, *given)

        return list(window_scores(experiment, params, documents, token_bytes, score=score, **how))

    base = scores(unchanged(model.depth, model.heads))
    unit = "documents" if len({window.document for window, _ in base}) >= FEW else "windows"
    draw = Resampling([window.document if unit == "documents" else i for i, (window, _) in enumerate(base)])
    nats, sizes = np.array([s.nats for _, s in base]), np.array([s.bytes for _, s in base], float)
    changes, todo = [], ways(model.depth, model.heads)
    for number, way in enumerate(todo, 1):
        say(f"{number} of {len(todo)}: {words(way._asdict())}")
        found = np.array([s.nats for _, s in scores(way.change)])
        difference, low, high = draw.ratio((found - nats) / math.log(2), sizes)
        bits = float(found.sum() / math.log(2) / sizes.sum())
        place = {"kind": way.kind, "block": way.block, "head": way.head}
        changes.append(place | {"bits_per_byte": bits, "difference": difference, "low": low, "high": high})
    whole = Score(*(sum(column) for column in zip(*(score for _, score in base), strict=True)))
    return {
        "bits_per_byte": float(whole.nats / math.log(2) / whole.bytes),
        "windows": len(base),
        "tokens": int(whole.tokens),
        "bytes": int(whole.bytes),
        "documents": len({window.document for window, _ in base}),
        "unit": unit,
        "units": draw.units,
        "resamples": RESAMPLES,
        "confidence": 0.95,
        "changes": changes,
        "blocks": anatomy(experiment, params, documents, token_bytes, how),
        "protocol": f"windows of {model.context} tokens that start every {how['stride']}, evenly spread; each token "
        f"scored once at most; intervals: 95 % of {RESAMPLES} paired resamples of {unit}",
    }


@functools.partial(jax.jit, static_argnums=0)
def _changed_rows(experiment: Experiment, params: Any, change: Change, *given: jax.Array) -> Any:
    with interfering(experiment):
        return row_scores(Transformer(experiment.model, experiment.vocab_size), altered(params, change), *given)


class Resampling:
    """Draws of units with replacement, the same for every difference; ``unit_W`` names the unit of each window."""

    def __init__(self, unit_W: list[int]):
        names, self._unit_W = np.unique(unit_W, return_inverse=True)
        self.units = len(names)
        even = np.full(self.units, 1 / self.units)
        self._times_RU = np.random.default_rng(SEED).multinomial(self.units, even, RESAMPLES)

    def ratio(self, top_W: np.ndarray, bottom_W: np.ndarray) -> tuple[float, float | None, float | None]:
        """Sum of one over the sum of the other, and its interval; None for a single unit."""
        top_U, bottom_U = (np.bincount(self._unit_W, x, self.units) for x in (top_W, bottom_W))
        if self.units < 2:
            return float(top_U.sum() / bottom_U.sum()), None, None
        ratio_R = (self._times_RU @ top_U) / np.maximum(self._times_RU @ bottom_U, 1)
        low, high = np.quantile(ratio_R, (0.025, 0.975))
        return float(top_U.sum() / bottom_U.sum()), float(low), float(high)


def anatomy(
    experiment: Experiment, params: Any, documents: Documents | Encoded, token_bytes: np.ndarray, how: dict[str, Any]
) -> list[dict[str, Any]]:
    """Of each block that is gone through: its gradient's norm, lengths, and its heads' scores. In loops a block has one
    gradient, which stands with each time that it is gone through."""
    model = experiment.model
    gradient_L = gradient_norms(experiment, params, documents, token_bytes, how)
    chosen = spread(windows(documents.lengths, model.context, model.context), READ)
    sums: Any = None
    for window in chosen:
        ids_T = np.zeros(model.context, np.int32)
        ids_T[: window.length] = documents[window.document][window.start : window.start + window.length]
        seen = _lengths(experiment.program, params, ids_T, window.length)
        sums = seen if sums is None else jax.tree.map(jnp.add, sums, seen)
    tokens = sum(w.length for w in chosen)
    pairs = max(1, tokens - len(chosen))  # every token but the first has one before it
    n = min([LONGEST, (model.context - 1) // 2, *(reach(model, i) for i in range(model.depth))])
    induction = None
    if n > 1:
        ids = [i for i in range(experiment.vocab_size) if token_bytes[i] > 0]
        random_Bn = np.random.default_rng(SEED).choice(ids, (REPEATED, n)).astype(np.int32)
        start_B1 = np.full((REPEATED, 1), documents[chosen[0].document][0], np.int32)
        induction = _induction(experiment.program, params, np.concatenate([start_B1, random_Bn, random_Bn], 1))
    return [
        {
            "block": p % model.depth + 1,
            "loop": p // model.depth + 1,
            "gradient_norm": float(gradient_L[p % model.depth]),
            "residual_norm": float(stream) / tokens,
            "attention_norm": float(attention) / tokens,
            "mlp_norm": float(mlp) / tokens,
            "previous_token": (np.asarray(previous_N, float) / pairs).tolist(),
            "induction": None if induction is None else np.asarray(induction[p], float).tolist(),
        }
        for p, (stream, attention, mlp, previous_N) in enumerate(sums)
    ]


def gradient_norms(
    experiment: Experiment, params: Any, documents: Documents | Encoded, token_bytes: np.ndarray, how: dict[str, Any]
) -> np.ndarray:
    """Norm of the gradient of the loss (mean nats per token of the whole set) by each block's weights, [L]."""
    total: Any = None

    def score(_: Any, params: Any, *given: Any) -> Any:
        nonlocal total
        gradient, found = _gradient(experiment.program, params, *given)
        total = gradient if total is None else jax.tree.map(jnp.add, total, gradient)
        return found

    found = list(window_scores(experiment, params, documents, token_bytes, score=score, **how))
    tokens = sum(score.tokens for _, score in found)
    squares = [
        np.square(np.asarray(g, np.float64) / tokens).reshape(len(g), -1).sum(-1) for g in jax.tree.leaves(total)
    ]
    norms_L: np.ndarray = np.sqrt(sum(squares))
    return norms_L


@functools.partial(jax.jit, static_argnums=0)
def _gradient(experiment: Experiment, params: Any, *given: jax.Array) -> Any:
    """The gradient of summed nats by the blocks' weights, and `row_scores`."""

    def nats(blocks: Any) -> Any:
        model = Transformer(experiment.model, experiment.vocab_size)
        found = row_scores(model, {**params, "blocks": blocks}, *given)
        return found[0].sum(), found

    return jax.grad(nats, has_aux=True)(params["blocks"])


@functools.partial(jax.jit, static_argnums=0)
def _lengths(experiment: Experiment, params: Any, ids_T: jax.Array, length: jax.Array) -> Any:
    """Of each block, over the first ``length`` positions, sums of: the stream's length, what attention adds, what the
    MLP adds; and the weight of the position before, in each head."""
    index_T = jnp.arange(len(ids_T))

    def total(x_1TD: jax.Array) -> jax.Array:
        return jnp.where(index_T < length, jnp.linalg.norm(x_1TD[0], axis=-1), 0).sum()

    def previous(weights_1NTS: jax.Array) -> jax.Array:
        at_NT = _before(weights_1NTS, 1)[0]
        return jnp.where((index_T[1:] < length)[None], at_NT, 0).sum(-1)

    blocks = look(experiment, params, ids_T[None]).blocks_P
    return [(*map(total, (b.stream_BTD, b.attention_BTD, b.mlp_BTD)), previous(b.weights_BNTS)) for b in blocks]


@functools.partial(jax.jit, static_argnums=0)
def _induction(experiment: Experiment, params: Any, ids_BT: jax.Array) -> list[jax.Array]:
    """Of each block and head, [N]: the mean weight, from the repeated tokens, of what came after them before."""
    n = ids_BT.shape[1] // 2
    blocks = look(experiment, params, ids_BT).blocks_P
    return [_before(b.weights_BNTS, n - 1)[..., 2:].mean((0, 2)) for b in blocks]


def _before(weights_BNTS: jax.Array, distance: int) -> jax.Array:
    """The weights of the key so many positions before each query that has one, [B, N, T - distance]."""
    return jnp.diagonal(put(weights_BNTS, None, None, None, None), -distance, 2, 3)


def words(way: dict[str, Any]) -> str:
    """A change as a person reads it."""
    block, head = way["block"], way["head"]
    return {
        "block": f"without block {block}",
        "attention": f"without the attention of block {block}",
        "mlp": f"without the MLP of block {block}",
        "head": f"without head {head} of block {block}",
        "swap": f"blocks {block} and {block + 1} change places",
        "cut": f"cut after block {block - 1}" if block > 1 else "no block at all",
    }[way["kind"]]
