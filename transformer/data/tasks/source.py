"""All tasks, and what stands for a text's tokenizer and loader where a task is trained on."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from transformer.data.loader import Loader
from transformer.data.packing import Batch, Int64
from transformer.data.tasks.brackets import Brackets
from transformer.data.tasks.groups import ModularAddition, Permutations
from transformer.data.tasks.hops import Hops
from transformer.data.tasks.recall import Recall
from transformer.data.tasks.sequences import Copy, Reverse, Sort
from transformer.data.tasks.task import HELD_OUT, Rows, Task, batch_of, make

AnyTask = Hops | Recall | Copy | Reverse | Sort | ModularAddition | Permutations | Brackets


class TaskLoader(Loader):
    """The batch of step n from a task's formula: row i of it is row n * batch + i of an endless stream."""

    def __init__(self, task: Task, seed: int, batch: int, context: int):
        self.task, self.seed, self.batch, self.context = task, seed, batch, context

    def batch_at(self, step: int, rows: Sequence[int] | Int64 | None = None) -> Batch:
        wanted_B = np.arange(self.batch) if rows is None else np.asarray(rows, np.int64)
        assert step >= 0 and wanted_B.size and wanted_B.min() >= 0 and wanted_B.max() < self.batch, (step, rows)
        return batch_of(make(self.task, self.seed, step * self.batch + wanted_B), self.context)

    def accounting(self) -> list[dict[str, Any]]:
        """Nothing is cut, dropped or repeated: rows are made as they are needed."""
        return []


def held_out(task: Task, rows_B: Int64) -> Rows:
    """The held-out rows with these numbers; the same for every seed of training."""
    return make(task, 0, rows_B, HELD_OUT)
