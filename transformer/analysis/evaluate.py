"""Loss, perplexity and bits per byte of text, each token scored exactly once.

A document is read through windows of the model's context that start every ``stride`` tokens; each
window scores the tokens that no window before it has scored, so all but the first tokens of a
document are predicted from at least ``context - stride`` tokens before them. The start token is
read but never scored, and neither is the end of a document: it is not in the text.

B rows, T positions.
"""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from transformer.config import Experiment
from transformer.data.documents import Documents, Encoded
from transformer.errors import UserError
from transformer.model.attention import check_cache
from transformer.model.masks import causal
from transformer.model.transformer import Transformer, empty_cache
from transformer.parallel.context import devices, order
from transformer.parallel.mesh import sizes
from transformer.parallel.rows import place, rows_here
from transformer.parallel.rules import put, shards
from transformer.training.loss import cross_entropy

TOKENS_AT_ONCE = 8192


class Window(NamedTuple):
    """Document ``document``'s tokens from ``start``: the last ``scored`` of its ``length`` targets count."""

    document: int
    start: int
    length: int
    scored: int


class Score(NamedTuple):
    """Sums over scored tokens; what is reported is made from them, once."""

    nats: float
    tokens: int
    bytes: int
    correct: int

    def report(self) -> dict[str, Any]:
        """Loss in nats per token, its exponential, bits per byte of source text, accuracy."""
        loss = self.nats / self.tokens
        return {
            "loss": loss,
            "perplexity": math.exp(loss) if loss < 700 else math.inf,
            "bits_per_byte": self.nats / math.log(2) / self.bytes,
            "accuracy": self.correct / self.tokens,
            "tokens": self.tokens,
            "bytes": self.bytes,
        }


def windows(lengths: Sequence[int], context: int, stride: int) -> list[Window]:
    """Windows over documents of that many tokens to score each. Every token is scored exactly once."""
    if not 1 <= stride <= context:
        raise UserError(f"--stride: {stride} is not between 1 and the context of {context}")
    found = []
    for document, length in enumerate(lengths):
        start = done = 0
        while done < length:
            end = min(start + context, length)
            found.append(Window(document, start, end - start, end - done))
            done, start = end, start + stride
    return found


def spread(found: list[Window], count: int | None) -> list[Window]:
    """``count`` of the windows, evenly spread; all of them for None."""
    if count is None or count >= len(found):
        return found
    return [found[i * len(found) // count] for i in range(count)]


def evaluate(
    experiment: Experiment, params: Any, documents: Documents | Encoded, token_bytes: np.ndarray, **how: Any
) -> list[Score]:
    """The score of every document (zeros for one that no window fell on); arguments as of `window_scores`."""
    totals = np.zeros((len(documents), 4))
    for window, score in window_scores(experiment, params, documents, token_bytes, **how):
        totals[window.document] += score
    return [Score(float(n), int(t), int(b), int(c)) for n, t, b, c in totals]


def window_scores(
    experiment: Experiment,
    params: Any,
    documents: Documents | Encoded,
    token_bytes: np.ndarray,
    *,
    stride: int,
    count: int | None = None,
    **how: Any,
) -> Iterator[tuple[Window, Score]]:
    """The score of every window; ``how`` as of `score_windows`. ``count`` limits the work to that many windows, evenly
    spread."""
    context = experiment.model.context
    chosen = spread(windows(documents.lengths, context, stride), count)
    return score_windows(experiment, params, documents, token_bytes, chosen, context, **how)


def score_windows(
    experiment: Experiment,
    params: Any,
    documents: Documents | Encoded,
    token_bytes: np.ndarray,
    chosen: list[Window],
    length: int,
    *,
    rows: int | None = None,
    pause: Callable[[], None] = lambda: None,
    int8: bool = False,
    score: Callable[..., Any] | None = None,
) -> Iterator[tuple[Window, Score]]:
    """The score of each window in ``chosen``, none of them longer than ``length``, which all are padded to.

    ``token_bytes[id]`` is how many bytes of text an id stands for. ``rows`` windows are read at once, by default some
    thousands of tokens. ``pause`` is called before each such group; what it raises ends the work. ``int8``: keys and
    values are read through an int8 cache, as in generation. ``score`` takes the place of `score_rows`, with its
    arguments. Each process reads the windows of its own devices, and all get all scores.
    """
    check_cache(experiment.model, int8, 0)
    if int8 and devices() > 1:
        raise UserError("--int8_cache: a cache is not cut over config.mesh.context, set it to 1 for that")
    parts = shards("batch", sizes(experiment.mesh))
    rows = rows or -(-max(1, TOKENS_AT_ONCE // length) // parts) * parts
    model, here = Transformer(experiment.model, experiment.vocab_size), rows_here(rows)
    for group in _groups(chosen, rows):
        pause()
        read = [group[b] if b < len(group) else None for b in here]  # the last group may lack some
        tokens_BT, targets_BT, weights_BT = _rows(read, documents, length)
        bytes_B = (token_bytes[targets_BT] * (weights_BT > 0)).sum(-1).astype(np.int32)
        given = place((tokens_BT, targets_BT, weights_BT, bytes_B), rows, here)
        found = (score or functools.partial(score_rows, int8=int8))(model, params, *given)
        nats_B, correct_B, bytes_B = (np.asarray(x, np.float64) for x in found)
        for b, window in enumerate(group):
            yield window, Score(nats_B[b], window.scored, bytes_B[b], correct_B[b])


def total(scores: Sequence[Score]) -> Score:
    """One score for all documents: sums added, divided once."""
    return Score(*(sum(column) for column in zip(*scores, strict=True)))


def _groups(found: list[Window], rows: int) -> Iterator[list[Window]]:
    for i in range(0, len(found), rows):
        yield found[i : i + rows]


def _rows(group: Sequence[Window | None], documents: Documents | Encoded, context: int) -> tuple[np.ndarray, ...]:
    """Tokens, targets and weights of each window; zeros for None."""
    tokens_BT = np.zeros((len(group), context), np.int32)
    targets_BT = np.zeros((len(group), context), np.int32)
    weights_BT = np.zeros((len(group), context), np.float32)
    for b, w in enumerate(group):
        if w is None:
            continue
        ids = documents[w.document][w.start : w.start + w.length + 1]
        tokens_BT[b, : w.length] = ids[:-1]
        targets_BT[b, : w.length] = ids[1:]
        weights_BT[b, w.length - w.scored : w.length] = 1
    return tokens_BT, targets_BT, weights_BT


def row_scores(
    model: Transformer,
    params: Any,
    tokens_BT: jax.Array,
    targets_BT: jax.Array,
    weights_BT: jax.Array,
    bytes_B: jax.Array,
    *,
    int8: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Of each row: summed nats and summed hits of the targets with weight, and its ``bytes_B``; on every device."""
    B, T = tokens_BT.shape
    index_BT = put(jnp.tile(order(T), (B, 1)), "batch", "time")
    cache = empty_cache(model.config, B, T, int8=True) if int8 else None
    logits_BTV, _ = model.apply({"params": params}, tokens_BT, index_BT, causal(T), cache, index_BT)
    losses_BT, _, correct_BT = cross_entropy(logits_BTV, targets_BT)
    counted_BT = weights_BT > 0
    nats_B, correct_B = jnp.where(counted_BT, losses_BT, 0.0).sum(-1), jnp.where(counted_BT, correct_BT, False).sum(-1)
    return put(nats_B, None), put(correct_B, None), put(bytes_B, None)


score_rows = jax.jit(row_scores, static_argnums=0, static_argnames="int8")
