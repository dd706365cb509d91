"""What a trained model says, to be looked at: continued prompts of a text, or rows of a task with its answers.

B rows, T positions, V vocabulary.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from transformer.data.tasks.source import held_out
from transformer.data.tasks.task import Task, batch_of
from transformer.generation.sample import SAMPLES, Sample, write_samples
from transformer.jsons import write_json
from transformer.model.masks import causal
from transformer.model.transformer import Transformer
from transformer.run import Run

ROWS = 3


def show(run: Run, params: Any, step: int) -> list[Sample]:
    """The run's prompts continued, or a task's first held-out rows answered; also written beside the run."""
    if not isinstance(run.experiment.data.source, Task):
        return write_samples(run, params, step)
    samples = answered(run, params, run.experiment.data.source)
    write_json(run.directory / SAMPLES, [{"prompt": s.prompt, "text": s.text, "step": step} for s in samples])
    return samples


def answered(run: Run, params: Any, task: Task) -> list[Sample]:
    """Under each row the answers that are right, and the model's; a dot where there is none."""
    experiment, rows = run.experiment, held_out(task, np.arange(ROWS))
    batch = batch_of(rows, experiment.model.context)
    model = Transformer(experiment.model, experiment.vocab_size)

    def best(params: Any) -> jax.Array:
        mask = causal(experiment.model.context, jnp.asarray(batch.segments_BT))
        logits_BTV, _ = model.apply({"params": params}, batch.tokens_BT, batch.positions_BT, mask)
        return logits_BTV.argmax(-1)

    found_BT = np.asarray(jax.jit(best)(params))
    samples = []
    for b in range(ROWS):
        here, asked_T = rows.present_BT[b], rows.asked_BT[b][rows.present_BT[b]]
        lines = [rows.tokens_BT[b], rows.answers_BT[b], found_BT[b, : len(here)]]
        given, right, said = ([task.symbols[i] for i in line[here]] for line in lines)
        width = max(map(len, task.symbols)) + 1
        shown = [given] + [[s if a else "." for s, a in zip(line, asked_T, strict=True)] for line in (right, said)]
        text = ["".join(f"{symbol:>{width}}" for symbol in line) for line in shown]
        samples.append(Sample(f"row   {text[0]}", f"\nright {text[1]}\nmodel {text[2]}", [], True))
    return samples
