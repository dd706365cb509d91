"""What a synthetic task is: rows made by a formula, each with exact answers at some of its positions.

A task is a tag of ``data.source`` with settings of its own. Its vocabulary is its own too. The target of a position is
the answer there, which is not always the next token, so a task is answered and not continued.
B rows, T positions.
"""

import hashlib
import json
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from transformer.data.packing import Batch, Int32
from transformer.data.tasks.draws import Draws, Int64
from transformer.errors import UserError
from transformer.settings import settings, tag_of, to_dict

FORMAT = 1  # raise it when the same settings would give other rows
TRAINING, HELD_OUT = 0, 1  # names of the two streams of rows


class Rows(NamedTuple):
    """Rows of a task, each int64 [B, T]. ``answers`` and ``difficulty`` mean something where ``asked`` (bool) only."""

    tokens_BT: Int64
    answers_BT: Int64
    asked_BT: npt.NDArray[np.bool_]
    difficulty_BT: Int64
    present_BT: npt.NDArray[np.bool_]  # False behind the end of a row that is shorter than the others


@settings
class Task:
    """A synthetic task. ``validation``: rows held out, the same for every seed."""

    validation: int = 1024

    @property
    def symbols(self) -> tuple[str, ...]:
        """The vocabulary: what people read for each id."""
        raise NotImplementedError

    @property
    def answers(self) -> range:
        """The ids that an answer can be; a guess that is uniform over them is what *chance* means."""
        raise NotImplementedError

    @property
    def length(self) -> int:
        """T: positions of the longest row."""
        raise NotImplementedError

    @property
    def difficulty(self) -> str:
        """What an answer's difficulty counts."""
        raise NotImplementedError

    def check(self) -> None:
        """UserError for settings that no row can be made with."""
        raise NotImplementedError

    def rows(self, draws: Draws, rows_B: Int64, stream: int) -> Rows:
        """The rows numbered ``rows_B`` (int64 [B]) of a stream, whose random numbers are ``draws``."""
        raise NotImplementedError

    @property
    def chance(self) -> float:
        """The share of right answers of a guess that is uniform over ``answers``."""
        return 1 / len(self.answers)

    @property
    def content_hash(self) -> str:
        """Of all that decides the rows but the seed."""
        content = json.dumps([FORMAT, tag_of(type(self)), to_dict(self)], sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()


def make(task: Task, seed: int, rows_B: Int64, stream: int = TRAINING) -> Rows:
    """Rows of a task as a pure function of (task, seed, number), whatever other rows are asked for."""
    return task.rows(Draws(seed, rows_B, stream), rows_B, stream)


def batch_of(rows: Rows, context: int) -> Batch:
    """Rows as what is trained on, padded to ``context``; weights are 1 where there is an answer."""
    B, T = rows.tokens_BT.shape

    def padded(x_BT: npt.ArrayLike, where_BT: npt.NDArray[np.bool_]) -> Int32:
        out_BT = np.zeros((B, context), np.int32)
        out_BT[:, :T] = np.where(where_BT, x_BT, 0)
        return out_BT

    return Batch(
        tokens_BT=padded(rows.tokens_BT, rows.present_BT),
        targets_BT=padded(rows.answers_BT, rows.asked_BT),
        segments_BT=padded(1, rows.present_BT),
        positions_BT=np.tile(np.arange(context, dtype=np.int32), (B, 1)),
        weights_BT=padded(1, rows.asked_BT).astype(np.float32),
    )


def whole_rows(tokens: Int64, answers: Int64, asked: npt.ArrayLike, difficulty: npt.ArrayLike) -> Rows:
    """Rows that are all of one length; ``asked`` and ``difficulty`` broadcast to [B, T]."""
    shape = tokens.shape
    asked_BT, difficulty_BT = np.broadcast_to(asked, shape), np.broadcast_to(difficulty, shape)
    return Rows(tokens, answers, asked_BT.astype(bool), difficulty_BT.astype(np.int64), np.ones(shape, bool))


def check_least(tag: str, **bounds: tuple[int, int]) -> None:
    """UserError for the first setting (its value and the least it may be) that is too small."""
    for name, (value, least) in bounds.items():
        if value < least:
            raise UserError(f"config.data.source.{name}: {value} is too small for {tag}, set {least} or more")


def letters(count: int) -> tuple[str, ...]:
    """a, b, ..., z, a1, b1, ..."""
    return tuple(chr(ord("a") + i % 26) + (str(i // 26) if i >= 26 else "") for i in range(count))
