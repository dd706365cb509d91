"""One step of a run again, with everything about it: for loss spikes and updates that were skipped.

The state before the step comes from the newest whole checkpoint before it, trained forward; training is
exact to the bit on the same machine, so the step is the same one.
"""

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from transformer import run as runs
from transformer.config import Experiment
from transformer.data.loader import batch_hash
from transformer.data.prepare import Log, loader, prepare
from transformer.errors import UserError
from transformer.files import CHECKPOINTS, saved_steps
from transformer.jsons import finite
from transformer.model.layers import declared_leaves
from transformer.model.masks import causal
from transformer.model.transformer import Transformer
from transformer.parallel.rows import place
from transformer.training.checkpoint import Damaged, restore_state, verify
from transformer.training.loop import first_state
from transformer.training.loss import cross_entropy
from transformer.training.metrics import read
from transformer.training.state import State, declarations, dials
from transformer.training.step import make_step, sum_gradients

SHOWN = 5  # rows and weights that a person is shown


def reproduce(run: runs.Run, step: int, cache: Path, say: Log) -> dict[str, Any]:
    """Run step ``step`` (1, 2, ...) of ``run`` again on the mesh that is set. Nothing is written.

    The result has the step's metrics, whether they equal the record in metrics.jsonl, the batch's hash,
    every row's loss with its text, and for each weight its norm, its gradient's and its numbers that are not
    finite. UserError for a step that the run does not have, or text that has changed.
    """
    experiment = run.experiment
    if not 1 <= step <= experiment.train.steps:
        raise UserError(f"--step: {step} is not one of the run's steps 1 to {experiment.train.steps}")
    prepared = prepare(experiment.data, experiment.tokenizer, cache, say)
    runs.check_text(run.directory, prepared.content_hash, prepared.tokenizer.fingerprint)
    batches = loader(experiment.data, prepared, experiment.train.batch, experiment.model.context)
    state = _state_before(run, step, say)
    begun, advance = int(state.step), make_step()
    program, given = experiment.program, dials(experiment)
    for done in range(begun, step - 1):
        state, _ = advance(program, state, place(batches.batch_at(done)), given)
        if (done - begun) % 100 == 99:
            say(f"at step {done + 1} of {step - 1}")
    batch = batches.batch_at(step - 1)
    sums, gradients = jax.jit(sum_gradients, static_argnums=0)(program, state, place(batch), given.seed)
    gradients = jax.tree.map(lambda g: g / jnp.maximum(sums.tokens, 1), gradients)
    weights = _weights(experiment, state.params, gradients)
    nats_B = row_nats(experiment, state.params, place(batch))
    rows = [
        {
            "row": b,
            "loss": float(nats) / max(float(batch.weights_BT[b].sum()), 1.0),
            "tokens": int(batch.weights_BT[b].sum()),
            "text": run.tokenizer.decode(batch.tokens_BT[b][batch.segments_BT[b] > 0]),
        }
        for b, nats in enumerate(np.asarray(nats_B))
    ]
    _, found = advance(program, state, place(batch), given)
    metrics = {name: float(value) for name, value in found._asdict().items() if value is not None}
    recorded = next((r for r in read(run.directory / "metrics.jsonl") if r["step"] == step and "loss" in r), None)
    names = ("loss", "grad_norm", "learning_rate")
    same = None if recorded is None else all(finite(metrics[n]) == recorded[n] for n in names)
    return {
        "run": str(run.directory),
        "step": step,
        "from_checkpoint": begun,
        "batch": batch_hash(batch),
        "metrics": metrics,
        "equals_record": same,
        "rows": rows,
        "weights": weights,
    }


@functools.partial(jax.jit, static_argnums=0)
def row_nats(experiment: Experiment, params: Any, batch: Any) -> jax.Array:
    """Cross-entropy of each row of a batch without dropout, summed over its targets: float32 [B]."""
    model = Transformer(experiment.model, experiment.vocab_size)
    mask = causal(experiment.model.context, batch.segments_BT)
    logits_BTV, _ = model.apply({"params": params}, batch.tokens_BT, batch.positions_BT, mask)
    losses_BT, *_ = cross_entropy(logits_BTV, batch.targets_BT)
    return jnp.where(batch.weights_BT > 0, losses_BT, 0.0).sum(-1)


def _state_before(run: runs.Run, step: int, say: Log) -> State:
    folder = run.directory / CHECKPOINTS
    for saved in reversed([s for s in saved_steps(folder) if s < step]):
        try:
            verify(folder / str(saved))
        except Damaged as damage:
            say(f"checkpoint {saved} is damaged: {damage}")
            continue
        say(f"going from checkpoint {saved} to step {step}")
        return restore_state(folder / str(saved), run.experiment)[0]
    say(f"going from the start to step {step}: no checkpoint from before is kept")
    return first_state(run.experiment, run.tokenizer)


def _weights(experiment: Experiment, params: Any, gradients: Any) -> list[dict[str, Any]]:
    names = list(declared_leaves(declarations(experiment)))
    leaves = zip(names, jax.tree.leaves(params), jax.tree.leaves(gradients), strict=True)
    return [
        {
            "name": name,
            "norm": float(jnp.sqrt(jnp.square(w).sum())),
            "gradient_norm": float(jnp.sqrt(jnp.square(g).sum())),
            "not_finite": int((~jnp.isfinite(w)).sum()),
            "gradient_not_finite": int((~jnp.isfinite(g)).sum()),
        }
        for name, w, g in leaves
    ]


def text(result: dict[str, Any]) -> str:
    """The result as a person reads it."""
    m = result["metrics"]
    record = {None: "there is no record to compare with", True: "equal to the record", False: "NOT equal to the record"}
    lines = [
        f"step {result['step']}: loss {m['loss']:.4f}, gradient norm {m['grad_norm']:.4g}, learning rate "
        f"{m['learning_rate']:.3g}, {m['tokens']:,.0f} tokens; {record[result['equals_record']]}",
        f"batch {result['batch']}",
        "",
        f"{'rows of the highest loss':<40}",
    ]
    # What is not finite comes first.
    for row in sorted(result["rows"], key=lambda r: -r["loss"] if r["loss"] == r["loss"] else -1e30)[:SHOWN]:
        lines.append(f"  row {row['row']:<4} {row['loss']:8.4f}  {row['text'][:80]!r}")
    lines += ["", f"{'weights of the largest gradient':<40}{'gradient':>12}{'weight':>12}{'not finite':>12}"]
    order = sorted(result["weights"], key=lambda w: (-w["gradient_not_finite"], -w["gradient_norm"]))
    for w in order[:SHOWN]:
        bad = w["gradient_not_finite"] + w["not_finite"]
        lines.append(f"  {w['name']:<38}{w['gradient_norm']:>12.4g}{w['norm']:>12.4g}{bad:>12}")
    return "\n".join(lines)
