"""How many of a synthetic task's held-out answers are right: in all, by difficulty, and by position.

An answer is right where no symbol is more likely; of several that are equally likely each has its share, so a model
that knows nothing scores exactly chance.
B rows, T positions, G difficulties.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from transformer.config import Experiment
from transformer.data.tasks.source import held_out
from transformer.data.tasks.task import Task, batch_of
from transformer.model.masks import causal
from transformer.model.transformer import Transformer
from transformer.parallel.context import order
from transformer.parallel.mesh import sizes
from transformer.parallel.rows import place, rows_here
from transformer.parallel.rules import put, shards
from transformer.training.loss import cross_entropy

POSITIONS_AT_ONCE = 8192


class Answers(NamedTuple):
    """Sums over answers by difficulty (``first``, ``first`` + 1, ...) and position, float64 [G, T] each."""

    task: Task
    first: int
    count_GT: np.ndarray
    nats_GT: np.ndarray
    right_GT: np.ndarray

    def report(self) -> dict[str, Any]:
        """Loss in nats per answer, its exponential, shares of right and wrong answers, and chance beside them."""
        count = float(self.count_GT.sum())
        loss, accuracy = float(self.nats_GT.sum()) / count, float(self.right_GT.sum()) / count
        return {
            "loss": loss,
            "perplexity": math.exp(loss) if loss < 700 else math.inf,
            "accuracy": accuracy,
            "error": 1 - accuracy,
            "chance_error": 1 - self.task.chance,
            "answers": int(count),
            "difficulty": self.task.difficulty,
            "by_difficulty": self._by(1, self.first),
            "by_position": self._by(0, 0),
        }

    def _by(self, axis: int, first: int) -> list[dict[str, Any]]:
        count, right = self.count_GT.sum(axis), self.right_GT.sum(axis)
        return [
            {"value": first + i, "answers": int(n), "error": float(1 - r / n)}
            for i, (n, r) in enumerate(zip(count, right, strict=True))
            if n
        ]


def answer(
    experiment: Experiment,
    params: Any,
    *,
    rows: int | None = None,
    count: int | None = None,
    pause: Callable[[], None] = lambda: None,
) -> Answers:
    """The held-out rows of the experiment's task answered, or the first ``count`` of them.

    ``rows`` and ``pause`` are as in `evaluate.evaluate`; each process answers the rows of its own devices.
    """
    model = Transformer(experiment.model, experiment.vocab_size)

    def judge(*given: jax.Array) -> tuple[jax.Array, jax.Array]:
        return judge_rows(model, params, *given)

    return judged(experiment, judge, rows, count, pause)


def judged(
    experiment: Experiment,
    judge: Callable[..., tuple[Any, Any]],
    rows: int | None = None,
    count: int | None = None,
    pause: Callable[[], None] = lambda: None,
) -> Answers:
    """As `answer`; ``judge`` gives of tokens, positions, segments and targets (each [B, T]) nats and right answers."""
    task, context = experiment.data.source, experiment.model.context
    assert isinstance(task, Task)
    parts = shards("batch", sizes(experiment.mesh))
    rows = rows or -(-max(1, POSITIONS_AT_ONCE // context) // parts) * parts
    total = task.validation if count is None else min(count, task.validation)
    made = held_out(task, np.arange(total))
    batch = batch_of(made, context)
    T = made.tokens_BT.shape[1]
    asked_BT, difficulty_BT = made.asked_BT, made.difficulty_BT
    first = int(difficulty_BT[asked_BT].min())
    shape = (int(difficulty_BT[asked_BT].max()) - first + 1, T)
    count_GT, nats_GT, right_GT = np.zeros(shape), np.zeros(shape), np.zeros(shape)
    here, at_T = rows_here(rows), order(context)
    for start in range(0, total, rows):
        pause()
        wanted_B = np.minimum(start + here, total - 1)  # the last group may lack some
        given = (batch.tokens_BT, batch.positions_BT, batch.segments_BT, batch.targets_BT)
        found = judge(*place(tuple(x_BT[wanted_B] for x_BT in given), rows, here))
        nats_BT, right_BT = np.zeros((rows, context)), np.zeros((rows, context))
        nats_BT[:, at_T], right_BT[:, at_T] = np.asarray(found[0]), np.asarray(found[1])
        row_N, t_N = np.nonzero(asked_BT[start : start + rows])
        cell_N = (difficulty_BT[start + row_N, t_N] - first, t_N)
        np.add.at(count_GT, cell_N, 1)
        np.add.at(nats_GT, cell_N, nats_BT[row_N, t_N])
        np.add.at(right_GT, cell_N, right_BT[row_N, t_N])
    return Answers(task, first, count_GT, nats_GT, right_GT)


@functools.partial(jax.jit, static_argnums=0)
def judge_rows(
    model: Transformer,
    params: Any,
    tokens_BT: jax.Array,
    positions_BT: jax.Array,
    segments_BT: jax.Array,
    targets_BT: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Nats and right answers of each position, float32 [B, T], on every device."""
    mask = causal(tokens_BT.shape[1], segments_BT)
    logits_BTV, _ = model.apply({"params": params}, tokens_BT, positions_BT, mask)
    nats_BT, right_BT = judge_logits(logits_BTV, targets_BT)
    return put(nats_BT, None, None), put(right_BT, None, None)


def judge_logits(logits_BTV: jax.Array, targets_BT: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Nats of each target and its share of being the most likely symbol: 1 over how many there are, or 0."""
    nats_BT, _, most_BT = cross_entropy(logits_BTV, targets_BT)
    ties_BT = (logits_BTV == logits_BTV.max(-1, keepdims=True)).sum(-1)
    return nats_BT, jnp.where(most_BT, 1.0 / ties_BT, 0.0)


def sentence(result: dict[str, Any]) -> str:
    """What was found as a person reads it."""
    rows = [(str(row["value"]), f"{row['error']:.4f}", f"{row['answers']:,}") for row in result["by_difficulty"]]
    lines = [f"{a:>14}{b:>10}{c:>12}" for a, b, c in [(result["difficulty"], "error", "answers"), *rows]]
    head = (
        f"{result['text']}: {result['error']:.4f} of the answers are wrong (by chance {result['chance_error']:.4f}), "
        f"loss {result['loss']:.4f} nats per answer, {result['answers']:,} answers, step {result['step']}"
    )
    return "\n".join([head, *lines])
