"""The training loop: what happens around the pure step, in order, on the host."""

import contextlib
import math
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax

from transformer import run as runs
from transformer.analysis.cost import training_flops, training_memory
from transformer.analysis.machine import matmul_rate, memory, peak_memory
from transformer.analysis.validation import as_record, in_words, validator
from transformer.config import Experiment
from transformer.data.loader import Loader, batch_hash
from transformer.data.prepare import Prepared, loader, prepare
from transformer.data.tasks.task import Task
from transformer.data.tokenizer import Tokenizer
from transformer.errors import UserError
from transformer.files import CHECKPOINTS, PROVENANCE, alone
from transformer.jsons import finite, is_remote, write_json
from transformer.model.attention import kernels_for_training
from transformer.parallel import ending, hosts
from transformer.parallel.mesh import make_mesh, sizes
from transformer.parallel.rows import place, rows_here
from transformer.settings import differing, leaves
from transformer.stopping import Stop, deferred
from transformer.tables import human
from transformer.training.checkpoint import Checkpoints
from transformer.training.metrics import METRICS, Records, best_step, read
from transformer.training.progress import Progress
from transformer.training.state import State, dials, fresh_state
from transformer.training.step import Metrics, make_step

Say = Callable[[str], None]
# What may differ between a run and one that starts from its weights: nothing that the weights depend on.
FREE = tuple(f"model.{name}" for name in ("dropout", "dtype", "stack", "remat", "attention.kernel"))


def train(experiment: Experiment, workdir: Path, cache: Path, argv: list[str], say: Say) -> None:
    """Train, or go on with the run in ``workdir``.

    Raises Stop after saving where a signal asked to; UserError for what the user can change;
    FloatingPointError after ``train.max_skipped`` steps in a row without a finite loss and gradient.
    """
    mesh = make_mesh(experiment.mesh)
    hosts.check_mesh(mesh.size)
    with jax.set_mesh(mesh):
        for _ in training(experiment, workdir, cache, argv, say):
            pass


def training(experiment: Experiment, workdir: Path, cache: Path, argv: list[str], say: Say) -> Iterator[None]:
    """``train`` in pieces, on the mesh that is set whenever it goes on: it pauses behind each step's dispatch."""
    if is_remote(workdir) and experiment.train.profile:
        raise UserError(f"config.train.profile: a trace is written on this machine, and --workdir is {workdir}")
    known = hosts.agree(lambda: runs.is_ours(workdir, experiment))
    check_memory(experiment)
    prepared = prepare(experiment.data, experiment.tokenizer, cache, say)
    check_vocabulary(experiment, prepared)
    check_prompts(experiment, prepared)
    model = experiment.model
    chosen = kernels_for_training(model)
    if known:
        runs.check_text(workdir, prepared.content_hash, prepared.tokenizer.fingerprint)
    batches = loader(experiment.data, prepared, experiment.train.batch, experiment.model.context)
    with contextlib.ExitStack() as stack:
        fresh = None if known else first_state(experiment, prepared.tokenizer)
        if hosts.is_first():
            if not known:
                runs.make(workdir)  # only now: nothing that was wrong with the input leaves files behind
            stack.enter_context(alone(workdir))
            if not known:
                runs.claim(workdir, experiment)
            prepared.tokenizer.save(workdir)  # again where the run is known: a kill may have come before it was written
        hosts.barrier("claimed")
        checkpoints = Checkpoints(workdir / CHECKPOINTS, experiment.train.keep)
        stack.push(quietly(checkpoints.close))
        found = checkpoints.restore(experiment, say) if known else None
        state = found[0] if found else fresh or first_state(experiment, prepared.tokenizer)
        numbers = found[1] if found else {"tokens": 0, "skipped": 0, "skipped_in_a_row": 0}
        start = int(state.step)
        evaluations = hosts.agree(
            lambda: [(r["step"], r["eval_loss"]) for r in read(workdir / METRICS) if "eval_loss" in r]
        )
        measured = {step: loss for step, loss in evaluations if step <= start}
        if start == experiment.train.steps and start in measured:
            return
        for kernel, why in chosen.items():
            say(f"attention kernel: {kernel} ({why})")
        if found:
            say(f"{workdir}: going on after step {start} of {experiment.train.steps}")
        origin = runs.provenance(argv, data=prepared.report, content_hash=prepared.content_hash)
        origin["tokenizer_hash"] = prepared.tokenizer.fingerprint
        origin["resumed_at_step"] = start
        origin["mesh"] = sizes(experiment.mesh)
        origin["accounting"] = batches.accounting()
        origin["earlier"] = runs.earlier(workdir)
        runs.check_machine(workdir, origin, say)
        write_json(workdir / PROVENANCE, origin)
        records = Records(workdir, start)
        stack.push(quietly(records.close))
        loop = Loop(experiment, workdir, prepared, batches, checkpoints, records, numbers, measured, say)
        signal = yield from loop.run(state, start)
        if signal is None:
            write_json(workdir / PROVENANCE, origin | {"end": runs.now()})
    hosts.barrier("trained")  # all files are closed
    if signal is not None:
        raise Stop(signal)


def quietly(close: Callable[[], None]) -> Callable[..., None]:
    """``close`` on leaving; where an error is already on its way, what goes wrong in closing does not replace it.

    Where another process was lost, nothing is waited for: its part will never come.
    """

    def leave(kind: Any, error: BaseException | None, trace: Any) -> None:
        if ending.is_loss(error):
            return
        try:
            close()
        except Exception:
            if error is None:
                raise

    return leave


def check_vocabulary(experiment: Experiment, prepared: Prepared) -> None:
    found = prepared.tokenizer.vocab_size
    if found != experiment.vocab_size:
        raise UserError(f"config.tokenizer: has {found} entries, the model was asked for {experiment.vocab_size}")


def check_prompts(experiment: Experiment, prepared: Prepared) -> None:
    """UserError now, not after the training, where a prompt to continue at its end does not fit."""
    if isinstance(experiment.data.source, Task):
        return  # which continues none
    for prompt in experiment.train.prompts:
        length, context = len(prepared.tokenizer.encode(prompt)) + 1, experiment.model.context
        if length >= context:
            raise UserError(
                f"config.train.prompts: {prompt!r} has {length} tokens with its start, which leave no room in the "
                f"context of {context}"
            )


def check_memory(experiment: Experiment) -> None:
    """UserError for weights and moments that do not fit however they are cut: XLA would fill the memory first."""
    bill, mesh = training_memory(experiment), experiment.mesh
    least = (int(bill["weights"]) + int(bill["moments"])) // (mesh.fsdp * mesh.expert * mesh.tensor)
    there = memory(math.prod(sizes(mesh).values()))
    if least > there:
        raise UserError(
            f"config.model: its weights and moments alone take {human(least)} on each device, which has "
            f"{human(there)}; make it smaller, or cut it over more devices with mesh.fsdp"
        )


def first_state(experiment: Experiment, tokenizer: Tokenizer) -> State:
    """Fresh weights, or those of the run in ``train.init_from`` with fresh moments and step 0."""
    check_source(experiment, tokenizer)
    state, source = fresh_state(experiment), experiment.train.init_from
    if source is None:
        return state
    params, _ = runs.restore_params(Path(source).expanduser() / CHECKPOINTS, experiment, "newest")
    return state._replace(params=params)


def check_source(experiment: Experiment, tokenizer: Tokenizer) -> None:
    """UserError where the weights of the run in ``train.init_from`` would mean something else here: another model,
    other ids."""
    source = experiment.train.init_from
    if source is None:
        return
    given = runs.open_run(Path(source).expanduser())
    differ = [f"model.{name}" for name in differing(leaves(experiment.model), leaves(given.experiment.model))]
    differ = [name for name in differ if name not in FREE]
    if tokenizer.fingerprint != given.tokenizer.fingerprint:
        differ.append("tokenizer")
    if differ:
        raise UserError(f"config.train.init_from: {source} differs from this experiment in {', '.join(differ)}")


class Undone(Exception):
    """An evaluation was given up."""


class Pending(NamedTuple):
    """A step whose metrics are still being computed."""

    step: int
    metrics: Metrics


class Loop:
    """The loop's own numbers: tokens so far, the best loss, the record that waits to be written."""

    def __init__(
        self,
        experiment: Experiment,
        workdir: Path,
        prepared: Prepared,
        loader: Loader,
        checkpoints: Checkpoints,
        records: Records,
        numbers: dict[str, Any],
        measured: dict[int, float | None],
        say: Say,
    ):
        self.experiment, self.workdir, self.prepared = experiment, workdir, prepared
        self.loader, self.checkpoints, self.records = loader, checkpoints, records
        self.numbers, self.measured, self.say = numbers, measured, say
        self.validate = validator(experiment, prepared)
        self.peak_flops = matmul_rate(experiment.model.dtype) * jax.sharding.get_mesh().size
        earlier = read(workdir / "timing.jsonl")
        self.alive: Callable[[], None] = lambda: None  # tells the watchdog
        self.display = Progress(experiment, say, earlier[-1]["seconds"] if earlier else 0.0)

    def run(self, state: State, start: int) -> Generator[None, None, int | None]:
        """Steps ``start`` to the last, a pause behind each. A step's metrics are read after the next's dispatch.

        Returns the signal that it was stopped by, the same on every process, after the same step.
        """
        train, program, given = self.experiment.train, self.experiment.program, dials(self.experiment)
        step = make_step()
        pending: Pending | None = None
        here = rows_here(train.batch)
        with (
            self.loader.iterate(start, here) as batches,
            deferred(self.workdir) as asked,
            self.tracing() as trace,
            ending.watchdog() as self.alive,
        ):
            heard = hosts.Heard(asked)
            if self.due(start) and start not in self.measured:
                self.evaluate(state.params, start, heard)  # the run was stopped before it could be
            for done in range(start + 1, train.steps + 1):
                trace(done, state)
                batch = next(batches)
                state, metrics = step(program, state, place(batch, train.batch, here), given)
                asked.unsaved.add(self.workdir)
                heard.step()
                if pending is not None:
                    self.record(pending)
                pending = Pending(done, metrics)
                last, best = done == train.steps or heard.signal is not None, False
                looks = last or self.due(done) or done % train.checkpoint_every == 0
                if looks:
                    self.record(pending)
                    pending = None
                if self.due(done):
                    try:
                        best = self.evaluate(state.params, done, heard)
                    except Exception:
                        if hosts.count() == 1:  # of several, the others may be elsewhere, and saving takes them all
                            self.checkpoints.save(state, self.numbers, self.best)  # what was trained is kept
                        raise
                # A signal that came since ``last`` was asked and met no record waits for the next step.
                saved = last or best or done % train.checkpoint_every == 0 or (looks and heard.signal is not None)
                if saved:
                    with self.display.paused():
                        self.records.sync()
                        self.checkpoints.save(state, self.numbers, self.best)
                    if hosts.count() == 1:  # of several, one that left at once would take unsaved steps from the others
                        asked.unsaved.discard(self.workdir)
                if heard.signal is not None and saved:
                    break
                yield
            signal = heard.now()
            self.checkpoints.wait()
        if signal is not None:
            self.say(f"{self.workdir}: saved after step {done}; the same command goes on from there")
        return signal

    def due(self, step: int) -> bool:
        """Whether the model is measured after this step."""
        train = self.experiment.train
        return step > 0 and (step % train.eval_every == 0 or step == train.steps)

    def record(self, pending: Pending) -> None:
        """Wait for a step's metrics; count its tokens; write it down and show it where it is due."""
        train, (step, metrics) = self.experiment.train, pending
        values = {name: float(value) for name, value in metrics._asdict().items() if value is not None}
        self.alive()
        tokens, skipped = int(values.pop("tokens")), int(values.pop("skipped"))
        new = skipped - self.numbers["skipped"]
        self.numbers["skipped"] = skipped
        self.numbers["skipped_in_a_row"] = self.numbers["skipped_in_a_row"] + 1 if new else 0
        self.numbers["tokens"] += 0 if new else tokens
        positions = train.batch * self.experiment.model.context  # a task has answers at some of them only
        timing = self.display.step(positions if isinstance(self.experiment.data.source, Task) else tokens)
        if new:
            self.say(
                f"step {step}: loss or gradient is not finite (or no token has weight); the update is skipped. "
                f"To look at it: python -m transformer runs reproduce --run={self.workdir} --step={step}"
            )
        if step % train.log_every == 0 or step in (1, train.steps) or new:
            record = {"step": step, "tokens": self.numbers["tokens"], **values, "skipped": skipped}
            if new:
                record["batch"] = batch_hash(self.loader.batch_at(step - 1))
            self.records.write("metrics", record)
            self.display.show(step, values["loss"])
            if timing is not None:
                mfu = timing["tokens_per_second"] * training_flops(self.experiment) / self.peak_flops
                self.records.write("timing", {"step": step, **timing, "mfu": mfu, "memory": peak_memory()})
        if self.numbers["skipped_in_a_row"] >= train.max_skipped:
            raise FloatingPointError(f"stopped at step {step}: {train.max_skipped} steps in a row were skipped")

    def evaluate(self, params: Any, step: int, heard: hosts.Heard) -> bool:
        """Measure on the fixed windows of the validation split and write it down; True for the best so far.

        Where a signal asks to stop it is left undone, and done first when the run goes on.
        """
        train = self.experiment.train

        def pause() -> None:
            self.alive()
            if heard.now() is not None:
                raise Undone

        with contextlib.suppress(Undone), self.display.paused():
            rows = train.batch // train.accumulate
            report = self.validate(params, rows=rows, count=train.eval_windows, pause=pause)
        if heard.signal is not None:
            return False
        self.measured[step] = finite(report["loss"])
        self.records.write("metrics", {"step": step} | as_record(report))
        self.display.say_line(f"step {step}: {in_words(report)}")
        return self.best == step

    @property
    def best(self) -> int | None:
        return best_step([{"step": step, "eval_loss": loss} for step, loss in self.measured.items()])

    @contextlib.contextmanager
    def tracing(self) -> Iterator[Callable[[int, State], None]]:
        """Start and stop the profiler around the steps of ``train.profile``."""
        profile, running = self.experiment.train.profile, False

        def at(step: int, state: State) -> None:
            nonlocal running
            if profile and step in (profile[0], profile[1] + 1):
                jax.block_until_ready(state)  # steps run behind their dispatch
            if profile and step == profile[0] and not running and hosts.is_first():
                jax.profiler.start_trace(str(self.workdir / "profile"))
                running = True
            elif running and step == profile[1] + 1:
                stop()

        def stop() -> None:
            nonlocal running
            jax.profiler.stop_trace()
            running = False
            self.say(f"{self.workdir / 'profile'}: trace of steps {profile[0]} to {profile[1]}")

        try:
            yield at
        finally:
            if running:
                stop()
