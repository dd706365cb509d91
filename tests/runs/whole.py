"""Whole runs for tests: an experiment and its text, the command line in this process or in one of its own."""

import contextlib
import io
import json
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from transformer import stopping
from transformer.__main__ import COMMANDS
from transformer.cli import main
from transformer.parallel.mesh import Mesh, make_mesh
from transformer.run import open_run
from transformer.training.checkpoint import restore_state, saved_steps

ROOT = Path(__file__).parents[2]
WORDS = ["the", "a", "cat", "dog", "sat", "ran", "on", "over", "mat", "hill", "and", "while", "rain", "fell\n", "sun"]
KEPT = 2

EXPERIMENT = f"""
import os
from transformer.config import Experiment
from transformer.data.prepare import Data
from transformer.data.tokenizer import Bpe, Bytes
from transformer.model.config import Model
from transformer.training.config import Train

def get_config():
    return Experiment(
        model=Model(depth=1, width=16, heads=2, context=32),
        tokenizer=Bytes(),
        data=Data(source="text.txt", piece_bytes=256),
        train=Train(
            steps=12, batch=4, learning_rate=1e-2, warmup=2, log_every=2, eval_every=5, checkpoint_every=4,
            eval_windows=8, keep={KEPT}, prompts=("the ", ""),
        ),
    )
"""

# What a process does to itself, at a step that is known: ``DO=SIGTERM:5`` sends a signal when step 5 is written down
# (RAISE fails there, SLEEP stays there), SAVE kills it when that checkpoint has been begun, FAIL lets that evaluation
# fail, KILL_X and SIGINT_X come inside phase X, HANG_X sends a signal while a library works for long, FULL forbids
# large files from a step on, NAN spoils the weights, SLOW makes each step last. The hash of each batch goes to the
# file BATCHES.
ACTS = """
import hashlib, resource, signal, threading, time
import jax
from transformer.analysis import evaluate as evaluation
from transformer.data import prepare
from transformer.data.loader import Loader, batch_hash
from transformer.training import loop
from transformer.training import step as steps
from transformer.training.checkpoint import Checkpoints

what, _, when = os.environ.get("DO", ":0").partition(":")
when = int(when)
record, save, run, evaluate = loop.Loop.record, Checkpoints.save, loop.Loop.run, loop.Loop.evaluate
batch_at, encode, rows, step = Loader.batch_at, prepare._encode, evaluation._rows, steps.train_step
at = 0

def send(name):
    os.kill(os.getpid(), getattr(signal, name if name.startswith("SIG") else "SIG" + name))

def record_and_act(self, pending):
    record(self, pending)
    if what in ("SIGTERM", "SIGINT", "SIGKILL") and pending.step == when:
        send(what)
    if what == "RAISE" and pending.step == when:
        raise ValueError("something broke")
    if what == "SLEEP" and pending.step == when:
        time.sleep(3600)
    if what == "FULL" and pending.step == when:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
    if what == "SLOW":
        time.sleep(0.1)

def save_and_act(self, state, progress, best):
    save(self, state, progress, best)
    if what == "SAVE" and int(state.step) == when:
        send("KILL")

def run_and_act(self, state, start):
    if what == "KILL_COMPILE":
        threading.Timer(0.2, send, ["KILL"]).start()
    if what.startswith("HANG_"):
        threading.Timer(0.5, send, [what[5:]]).start()
        hashlib.pbkdf2_hmac("sha256", b"a", b"b", 1 << 28)  # minutes in C, without Python's handlers
    if what == "NAN":
        steps.train_step = spoil
    return run(self, state, start)

def spoil(experiment, state, batch, given):
    import jax.numpy as jnp
    bad = jnp.where(state.step >= when - 1, jnp.nan, 1.0)
    new, metrics = step(experiment, state._replace(params=jax.tree.map(lambda w: w * bad, state.params)), batch, given)
    whole = jax.tree.map(lambda a, b: jnp.where(jnp.isnan(bad), a, b), state.params, new.params)
    return new._replace(params=whole), metrics

def evaluate_and_act(self, params, step, asked):
    global at
    at = step
    if what == "FAIL" and step == when:
        raise RuntimeError("the evaluation failed")
    return evaluate(self, params, step, asked)

def rows_and_act(*args):
    if what.endswith("_EVALUATE") and at == when:
        send(what.removesuffix("_EVALUATE"))
    return rows(*args)

def encode_and_act(*args):
    if what == "KILL_PREPARE":
        send("KILL")
    return encode(*args)

def batch_and_note(self, step, rows=None):
    batch = batch_at(self, step, rows)
    with open(os.environ["BATCHES"], "a") as file:
        file.write(f"{step} {batch_hash(batch)}\\n")
    return batch

loop.Loop.record, loop.Loop.run, loop.Loop.evaluate = record_and_act, run_and_act, evaluate_and_act
Checkpoints.save, evaluation._rows, prepare._encode, Loader.batch_at = (
    save_and_act, rows_and_act, encode_and_act, batch_and_note)
"""


class Result(NamedTuple):
    status: int
    out: str
    err: str


@contextlib.contextmanager
def inside(folder: Path) -> Iterator[None]:
    """With ``folder`` as the working directory, and programs compiled in a fifth of the time."""
    jax.config.update("jax_disable_most_optimizations", True)
    with contextlib.chdir(folder):
        yield
    jax.config.update("jax_disable_most_optimizations", False)


def text(seed: int, words: int = 900) -> str:
    return " ".join(random.Random(seed).choices(WORDS, k=words)) + f"\n{seed}\n"


def run(*argv: str) -> Result:
    """The command line in this process."""
    before = [(s, signal.getsignal(s)) for s in stopping.SIGNALS]
    try:
        with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
            status = main(COMMANDS, argv)
    finally:
        for number, handler in before:
            signal.signal(number, handler)
    return Result(status, out.getvalue(), err.getvalue())


def done(*argv: str) -> Any:
    """What --json prints, which must be one object and all there is on standard output."""
    found = run(*argv, "--json")
    assert found.status == 0, found.err
    assert len(found.out.splitlines()) == 1

    def no_constant(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    result = json.loads(found.out, parse_constant=no_constant)
    assert isinstance(result, dict)
    return result


def refused(*argv: str) -> str:
    found = run(*argv)
    assert (found.status, found.out) == (2, ""), found
    assert "Traceback" not in found.err and found.err.count("error: ") == 1
    line = found.err.splitlines()[-1]
    assert line.startswith("error: ")
    return line


def content(directory: Path) -> dict[str, bytes]:
    return {str(p.relative_to(directory)): p.read_bytes() for p in directory.rglob("*") if p.is_file()}


def leaves(directory: Path, which: str = "newest") -> list[np.ndarray]:
    with jax.set_mesh(make_mesh(Mesh())):
        return [np.asarray(x) for x in jax.tree.leaves(open_run(directory).params(which)[0])]


def state_of(directory: Path) -> list[bytes]:
    """Everything that a run goes on from: parameters, moments, counters, progress; bit for bit."""
    with jax.set_mesh(make_mesh(Mesh())):
        folder = directory / "checkpoints"
        state, progress = restore_state(folder / str(saved_steps(folder)[-1]), open_run(directory).experiment)
    return [*(np.asarray(x).tobytes() for x in jax.tree.leaves(state)), json.dumps(progress, sort_keys=True).encode()]


TRAIN = ("train", "--config=experiment.py", "--cache=cache")
