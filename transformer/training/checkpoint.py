"""Checkpoints through Orbax, written in the background; the newest few and the best are kept.

Each holds three items: ``params``, ``optimizer`` (moments and counters) and ``progress`` (plain
numbers of the host: tokens so far, the best loss). Sampling and evaluating read ``params`` alone.
"""

import math
import shutil
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding, PartitionSpec
from orbax.checkpoint.checkpoint_managers import preservation_policy as keep_policy

from transformer.config import Experiment
from transformer.errors import UserError
from transformer.training.state import State, init_params, init_state

UNFINISHED = "*.orbax-checkpoint-tmp"


def _loss(metrics: dict[str, float]) -> float:
    loss = metrics["eval_loss"]
    return loss if math.isfinite(loss) else math.inf


class Checkpoints:
    """The checkpoints of one run. ``save`` returns at once; ``close`` waits until all are on disk."""

    def __init__(self, directory: Path, keep: int):
        directory = Path(directory).absolute()
        for debris in directory.glob(UNFINISHED):  # left by a killed save; Orbax neither counts nor removes it
            shutil.rmtree(debris, ignore_errors=True)
        best = keep_policy.BestN(get_metric_fn=_loss, reverse=True, n=1, keep_checkpoints_without_metrics=False)
        self._manager = ocp.CheckpointManager(
            directory,
            options=ocp.CheckpointManagerOptions(
                preservation_policy=keep_policy.AnyPreservationPolicy([keep_policy.LatestN(keep), best]),
                best_fn=_loss,
                best_mode="min",
                create=True,
            ),
        )

    @property
    def newest(self) -> int | None:
        return self._manager.latest_step()

    def save(self, state: State, progress: dict[str, Any]) -> None:
        """Begin to write the state after ``state.step`` steps. An earlier save that failed raises here."""
        step = int(state.step)
        optimizer = {"step": state.step, "skipped": state.skipped, "opt_state": state.opt_state}
        items = ocp.args.Composite(
            params=ocp.args.StandardSave(state.params),
            optimizer=ocp.args.StandardSave(optimizer),
            progress=ocp.args.JsonSave(dict(progress)),  # it is written later, when the loop has counted on
        )
        # A checkpoint between two evaluations has no loss of its own, and cannot be the best one.
        measured = progress.get("eval_step") == step
        metrics = {"eval_loss": float(progress["eval_loss"]) if measured else math.inf}
        if not self._manager.save(step, args=items, metrics=metrics):
            raise RuntimeError(f"checkpoint {step} was not saved: {self._manager.directory} holds step {self.newest}")

    def restore(self, experiment: Experiment) -> tuple[State, dict[str, Any]]:
        """The newest state, laid out for the mesh that is set."""
        like = _abstract(lambda: init_state(experiment))
        optimizer = {"step": like.step, "skipped": like.skipped, "opt_state": like.opt_state}
        found = self._manager.restore(
            self.newest,
            args=ocp.args.Composite(
                params=ocp.args.StandardRestore(like.params),
                optimizer=ocp.args.StandardRestore(optimizer),
                progress=ocp.args.JsonRestore(),
            ),
        )
        return State(params=found["params"], **found["optimizer"]), found["progress"]

    def wait(self) -> None:
        """Until everything is on disk; raises what went wrong on the way."""
        self._manager.wait_until_finished()

    def close(self) -> None:
        self.wait()
        self._manager.close()


def restore_params(directory: Path, experiment: Experiment, which: str) -> tuple[Any, int]:
    """The weights of checkpoint ``which`` ("newest", "best", or a step) and its step. Reads nothing else."""
    manager = ocp.CheckpointManager(
        Path(directory).absolute(),
        options=ocp.CheckpointManagerOptions(best_fn=_loss, best_mode="min", read_only=True),
    )
    with manager:
        steps = sorted(manager.all_steps())
        if not steps:
            raise UserError(f"{directory}: holds no checkpoint yet")
        step = {"newest": manager.latest_step(), "best": manager.best_step()}.get(which)
        if step is None and which.isdecimal() and int(which) in steps:
            step = int(which)
        if step is None:
            raise UserError(f"--checkpoint: {which!r} is not newest, best or one of the steps {steps}")
        like = _abstract(lambda: init_params(experiment))
        found = manager.restore(step, args=ocp.args.Composite(params=ocp.args.StandardRestore(like)))
        return found["params"], step


def _abstract(make: Any) -> Any:
    """Shapes, dtypes and layouts of what ``make`` would return, on the mesh that is set."""
    mesh = jax.sharding.get_mesh()

    def concrete(x: Any) -> jax.ShapeDtypeStruct:
        layout = x.sharding.spec if x.sharding is not None else PartitionSpec()  # scalars have none
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, layout))

    return jax.tree.map(concrete, jax.eval_shape(make))
