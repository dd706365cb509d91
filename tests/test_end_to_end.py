"""Whole runs: files on disk, every command on them, and processes that are stopped and started again."""

import contextlib
import gzip
import io
import json
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

from transformer import stopping
from transformer.__main__ import COMMANDS
from transformer.cli import main
from transformer.errors import UserError
from transformer.parallel.mesh import Mesh, make_mesh
from transformer.run import open_run

ROOT = Path(__file__).parents[1]
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

# What a process does to itself, at a step that is known: ``DO=SIGTERM:5`` sends a signal when step 5 is
# written down, ``DO=SAVE:8`` kills it when the checkpoint of step 8 has been begun, ``DO=FAIL:12`` lets the
# evaluation after step 12 fail. The hash of each batch goes to the file BATCHES.
ACTS = """
import signal
from transformer.data.loader import Loader, batch_hash
from transformer.training import loop
from transformer.training.checkpoint import Checkpoints

what, _, when = os.environ.get("DO", ":0").partition(":")
record, save, evaluate, batch_at = loop.Loop.record, Checkpoints.save, loop.Loop.evaluate, Loader.batch_at

def record_and_act(self, step, metrics):
    record(self, step, metrics)
    if what.startswith("SIG") and step == int(when):
        os.kill(os.getpid(), getattr(signal, what))

def save_and_act(self, state, progress):
    save(self, state, progress)
    if what == "SAVE" and int(state.step) == int(when):
        os.kill(os.getpid(), signal.SIGKILL)

def fail(self, params, step):
    if what == "FAIL" and step == int(when):
        raise RuntimeError("the evaluation failed")
    evaluate(self, params, step)

def batch_and_note(self, step, start=0, stop=None):
    batch = batch_at(self, step, start, stop)
    with open(os.environ["BATCHES"], "a") as file:
        file.write(f"{step} {batch_hash(batch)}\\n")
    return batch

loop.Loop.record, Checkpoints.save, loop.Loop.evaluate = record_and_act, save_and_act, fail
Loader.batch_at = batch_and_note
"""


class Result(NamedTuple):
    status: int
    out: str
    err: str


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
    from transformer.training.checkpoint import Checkpoints

    with jax.set_mesh(make_mesh(Mesh())):
        checkpoints = Checkpoints(directory / "checkpoints", KEPT)
        state, progress = checkpoints.restore(open_run(directory).experiment)
        checkpoints.close()
    return [*(np.asarray(x).tobytes() for x in jax.tree.leaves(state)), json.dumps(progress, sort_keys=True).encode()]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The working directory of this module, with an experiment and one text; relative names make equal settings."""
    before = Path.cwd()
    folder = tmp_path_factory.mktemp("home")
    (folder / "experiment.py").write_text(EXPERIMENT)
    (folder / "acts.py").write_text(EXPERIMENT + ACTS)
    (folder / "text.txt").write_text(text(0))
    os.chdir(folder)
    jax.config.update("jax_disable_most_optimizations", True)  # a fifth of the time to compile
    yield folder
    jax.config.update("jax_disable_most_optimizations", False)
    os.chdir(before)


TRAIN = ("train", "--config=experiment.py", "--cache=cache")


@pytest.fixture(scope="module")
def trained(home: Path) -> Path:
    """A run that was trained to its end."""
    result = done(*TRAIN, "--workdir=run")
    assert result["step"] == 12 and result["report"] == "run/report.html"
    return home / "run"


@pytest.mark.smoke
def test_a_run_from_text_to_page_with_a_trained_tokenizer(home: Path) -> None:
    """The smallest complete run: train, sample, evaluate, report."""
    changes = ("--config.tokenizer=bpe", "--config.tokenizer.vocab_size=280", "--config.train.steps=3")
    result = done(*TRAIN, *changes, "--workdir=smoke")
    assert result["step"] == 3 and 0 < result["bits_per_byte"] < 10
    assert (home / "smoke" / "tokenizer.model").stat().st_size > 0
    found = run("sample", "--run=smoke", "--prompt=the cat", "--tokens=5", "--temperature=0")
    assert found.status == 0 and found.out.startswith("the cat")
    assert done("evaluate", "--run=smoke", "--cache=cache")["bits_per_byte"] == result["bits_per_byte"]
    assert (home / done("report", "smoke")["report"]).read_text().startswith("<!doctype html>")


def test_a_run_does_not_go_on_with_other_text(home: Path) -> None:
    """The text behind data.source changed between two starts: refused, and the run's tokenizer is as it was."""
    source, more = home / "shelf", ("--config.data.source=shelf", "--config.tokenizer=bpe", "--config.train.steps=2")
    source.mkdir()
    (source / "one.txt").write_text("the cat sat on the mat and the dog ran over the hill\n" * 200)
    (source / "two.txt").write_text("a bird sang in the tall tree while rain fell all day\n" * 200)
    argv = (*TRAIN, *more, "--config.tokenizer.vocab_size=310", "--workdir=other")
    done(*argv)
    before = (home / "other" / "tokenizer.model").read_bytes()
    (source / "three.txt").write_text("xylophones quiz jovial wizards, vexing them 0123456789\n" * 300)
    assert "was trained on other text" in refused(*argv)
    assert (home / "other" / "tokenizer.model").read_bytes() == before


def test_prompts_and_directories_are_checked_before_any_training(home: Path) -> None:
    long = "--config.train.prompts=short," + "x" * 200
    assert "config.train.prompts: 'xxx" in refused(*TRAIN, "--workdir=bad", long)
    assert "is a URL" in refused(*TRAIN, "--workdir=gs://bucket/run")
    assert "is a URL" in refused("sample", "--run=gs://bucket/run")
    assert not (home / "bad").exists() and not (home / "gs:").exists()


def test_the_files_of_a_run(trained: Path) -> None:
    names = {p.name for p in trained.iterdir()}
    assert names == {
        *("config.json", "provenance.json", "metrics.jsonl", "timing.jsonl", "checkpoints", "tensorboard"),
        *("evaluation.json", "samples.json", "report.html"),
    }, "tokenizer.model is absent for bytes, and nothing half-written is left"
    assert any((trained / "tensorboard").iterdir())
    metrics = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    logged = [r for r in metrics if "loss" in r]
    assert [r["step"] for r in logged] == [1, 2, 4, 6, 8, 10, 12]
    assert all({"step", "tokens", "loss", "learning_rate", "grad_norm"} <= r.keys() for r in logged)
    measured = [r for r in metrics if "eval_loss" in r]
    assert [r["step"] for r in measured] == [5, 10, 12]
    assert all({"eval_loss", "perplexity", "bits_per_byte"} <= r.keys() for r in measured)
    timing = [json.loads(line) for line in (trained / "timing.jsonl").read_text().splitlines()]
    assert timing and all({"step", "seconds", "tokens_per_second", "mfu", "memory"} <= r.keys() for r in timing)
    clock = {"seconds", "tokens_per_second", "mfu", "memory", "time"}
    assert not any(clock & r.keys() for r in metrics), "nothing in it depends on the clock"
    origin = json.loads((trained / "provenance.json").read_text())
    assert {"command", "commit", "uncommitted", "versions", "devices", "host", "start", "end"} <= origin.keys()
    assert {"content_hash", "tokenizer_hash"} <= origin.keys()
    assert origin["command"][:2] == ["train", "--config=experiment.py"]
    assert origin["accounting"][0]["dropped"] == 0


def test_the_newest_checkpoints_and_the_best_are_kept(trained: Path) -> None:
    steps = sorted(int(p.name) for p in (trained / "checkpoints").iterdir())
    records = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    measured = {r["step"]: r["eval_loss"] for r in records if "eval_loss" in r}
    improved = {s for s in measured if measured[s] == min(loss for t, loss in measured.items() if t <= s)}
    saved = sorted({4, 8, 12} | improved)  # every fourth step, and each new best
    assert steps == sorted({*saved[-KEPT:], min(measured, key=measured.__getitem__)})
    assert done("sample", f"--run={trained}", "--tokens=1", "--checkpoint=best")["step"] in steps
    assert done("sample", f"--run={trained}", "--tokens=1", f"--checkpoint={steps[0]}")["step"] == steps[0]
    assert "is not newest, best or one of the steps" in refused("sample", f"--run={trained}", "--checkpoint=5")


def test_the_same_command_again_does_nothing_more(trained: Path) -> None:
    before = content(trained)
    result = done(*TRAIN, "--workdir=run")
    assert result["step"] == 12
    after = content(trained)
    same = {name for name in before if not name.startswith("tensorboard")}
    assert {name: after[name] for name in same} == {name: before[name] for name in same}


def test_every_command_on_a_run_prints_one_json_object(trained: Path) -> None:
    texts = [s["text"] for s in done("sample", "--run=run", "--prompt=the ", "--prompt=a", "--tokens=9")["samples"]]
    assert len(texts) == 2
    evaluated = done("evaluate", "--run=run", "--cache=cache")
    assert evaluated == json.loads((trained / "evaluation.json").read_text())
    for name in ("loss", "perplexity", "bits_per_byte", "window", "stride", "protocol", "tokens", "bytes"):
        assert name in evaluated, "E02, E05: unit, protocol and prefix are in the result"
    assert "start token" in evaluated["protocol"]
    (trained.parent / "held.txt").write_text("the cat sat\n")
    own = done("evaluate", "--run=run", "--text=held.txt", "--stride=32", "--cache=cache")
    assert (own["bytes"], own["stride"], own["documents"]) == (12, 32, 1)
    assert done("report", "run")["report"] == "run/report.html"


def test_the_same_seed_and_the_slow_way_give_the_same_text(trained: Path) -> None:
    def sampled(*more: str) -> list[Any]:
        return done("sample", "--run=run", "--prompt=the ", "--prompt=a", "--tokens=12", *more)["samples"]

    assert sampled() == sampled("--seed=0") == sampled("--no_cache")
    assert sampled("--seed=1") != sampled() and sampled("--seed=4294967295") != sampled()
    alone = run("sample", "--run=run", "--prompt=the ", "--tokens=12")
    assert alone.status == 0 and alone.out == f"the {sampled()[0]['text']}\n", "streamed"


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--prompt=" + "x" * 40], ["41", "32"]),
        (["--prompt=" + "x" * 20, "--tokens=20"], ["21", "20", "32", "--tokens=11"]),
        (["--prompt=\udcff"], ["lone surrogate"]),
        (["--tokens=0"], ["--tokens: 0"]),
        (["--seed=-1"], ["--seed: -1"]),
        (["--checkpoint=later"], ["'later'", "12"]),
        (["--temperature=0", "--top_k=3"], ["--top_k: has no effect"]),
    ],
)
def test_sampling_that_cannot_be_done_is_refused(trained: Path, argv: list[str], words: list[str]) -> None:
    """G07, G14: and nothing of it is printed."""
    line = refused("sample", "--run=run", *argv)
    assert all(word in line for word in words), line


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("missing.txt", None, "no such file"),
        ("empty.txt", b"", ""),
        ("blank.jsonl", b"\n\n", "holds no text"),
        ("void.jsonl", b'{"text": ""}\n', "holds no text"),
        ("binary.txt", b"ab\x00cd", "not a text file"),
        ("latin.txt", b"caf\xe9", "not UTF-8"),
    ],
)
def test_measuring_on_what_is_no_text_is_refused(trained: Path, name: str, data: bytes | None, words: str) -> None:
    if data is not None:
        Path(name).write_bytes(data)
    line = refused("evaluate", "--run=run", f"--text={name}")
    assert words in line and name in line


@pytest.mark.parametrize("stride", ["0", "-1", "33"])
def test_a_stride_that_leaves_tokens_out_is_refused(trained: Path, stride: str) -> None:
    assert f"--stride: {stride} is not between 1 and the context of 32" in refused(
        "evaluate", "--run=run", f"--stride={stride}", "--cache=cache"
    )


def test_a_run_without_a_checkpoint_says_so(trained: Path, tmp_path: Path) -> None:
    shutil.copy(trained / "config.json", tmp_path)
    assert "holds no checkpoint yet" in refused("sample", f"--run={tmp_path}")
    assert "has no records yet" in refused("report", str(tmp_path))
    assert [p.name for p in tmp_path.iterdir()] == ["config.json"]


def test_text_that_has_changed_since_is_not_measured_as_the_validation_split(trained: Path, home: Path) -> None:
    original = (home / "text.txt").read_text()
    try:
        (home / "text.txt").write_text(original + " more")
        assert "was trained on other text" in refused("evaluate", "--run=run", "--cache=other")
    finally:
        (home / "text.txt").write_text(original)


def test_a_directory_of_another_configuration_is_refused_with_the_differences(trained: Path) -> None:
    before = content(trained)
    line = refused(*TRAIN, "--workdir=run", "--config.model.positions=rotary", "--config.train.seed=3")
    assert "train.seed was 0, now 3" in line and "model.positions.kind was 'learned', now 'rotary'" in line
    assert "model.positions.base was 'absent', now 10000.0" in line and "model.depth" not in line
    assert content(trained) == before


def test_a_directory_with_foreign_files_is_refused(home: Path, tmp_path: Path) -> None:
    """K05, K12: also one that holds checkpoints of unknown origin. Nothing is deleted."""
    (tmp_path / "checkpoints" / "20").mkdir(parents=True)
    (tmp_path / "notes.txt").write_text("mine")
    assert "is not empty and holds no run" in refused(*TRAIN, f"--workdir={tmp_path}")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoints", "notes.txt"]
    assert "is a file" in refused(*TRAIN, f"--workdir={tmp_path / 'notes.txt'}")
    assert "cannot write to" in refused(*TRAIN, f"--workdir={tmp_path / 'notes.txt' / 'run'}")


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("nowhere.txt", None, "no such file"),
        ("empty.txt", b"", "is empty"),
        ("newlines.txt", b"\n" * 9, ""),
        ("line.txt", b"one line\n", "can be held out"),
        ("short.txt", b"one\n" * 20, "can be held out"),
        ("binary.txt", b"\x00\x01\x02" * 999, "not a text file: a NUL byte at byte 0"),
        ("latin.txt", b"caf\xe9 " * 999, "not UTF-8: byte 0xE9 at byte 3"),
        ("broken.jsonl", b'{"text": "a"}\n{', "line 2: not JSON"),
        ("fields.jsonl", b'{"txt": "a"}\n', "did you mean 'txt'?"),
        ("damaged.txt.gz", b"no archive", "cannot be read"),
        ("damaged.parquet", b"no table", "not a Parquet file"),
        ("shakespear", None, "did you mean 'shakespeare'?"),
    ],
)
def test_bad_text_is_one_line_and_leaves_nothing(home: Path, name: str, data: bytes | None, words: str) -> None:
    """D16: the directory stays free, so the same command with the right text works."""
    if data is not None:
        (home / name).write_bytes(data)
    line = refused(*TRAIN, "--workdir=bad", f"--config.data.source={name}")
    assert words in line and (name in line or "data.source" in line), line
    assert not (home / "bad").exists()
    assert not [p for p in (home / "cache").iterdir() if p.name.startswith("preparing-")]


def test_text_shorter_than_one_row_is_refused_with_both_numbers(home: Path) -> None:
    """D16: tokens found and needed."""
    (home / "row.jsonl").write_text('{"text": "abc"}\n{"text": "abcd"}\n')
    line = refused(*TRAIN, "--workdir=bad", "--config.data.source=row.jsonl")
    assert "tokens found" in line and "33 needed" in line and not (home / "bad").exists()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (["--config.model.heads=3"], "config.model.heads"),
        (["--config.mesh.data=4", "--config.mesh.tensor=4", "--config.model.heads=4"], "config.mesh"),
        (["--config.train.init_from=nowhere"], "nowhere: is not a run's directory"),
        (["--config.data.validation=2"], "data.validation"),
        (["--config.tokenizer=bpe", "--config.tokenizer.vocab_size=90000"], "vocab_size"),
        (["--config.data.weights=1"], "config.data.weights"),
    ],
)
def test_settings_that_cannot_work_leave_nothing(home: Path, changes: list[str], words: str) -> None:
    """T04: also a vocabulary that this text cannot fill."""
    assert words in refused(*TRAIN, "--workdir=bad", *changes)
    assert not (home / "bad").exists()


def test_init_from_starts_at_step_0_with_the_weights_of_another_run(trained: Path, home: Path) -> None:
    """C06: an init source is no resume source."""
    from transformer.training.loop import first_state

    experiment = open_run(trained).experiment
    changed = {"train": {**vars_of(experiment.train), "init_from": "run"}}
    fresh = rebuilt(experiment, changed)
    with jax.set_mesh(make_mesh(Mesh())):
        state = first_state(fresh, open_run(trained).tokenizer)
    assert int(state.step) == 0
    for a, b in zip(jax.tree.leaves(state.params), leaves(trained), strict=True):
        assert np.asarray(a).tobytes() == b.tobytes()
    assert all(not np.asarray(x).any() for x in jax.tree.leaves(state.opt_state)), "fresh moments"
    for other in ("model.width=32", "model.positions=sinusoidal", "model.norm.epsilon=1e-3"):
        line = refused(*TRAIN, "--workdir=bad", "--config.train.init_from=run", f"--config.{other}")
        assert "config.train.init_from" in line and other.partition("=")[0] in line and not (home / "bad").exists()
    result = done(*TRAIN, "--workdir=more", "--config.train.init_from=run", "--config.train.steps=2")
    assert result["step"] == 2 and result["loss"] < 4.5, "it went on from what was learnt"


def vars_of(record: Any) -> dict[str, Any]:
    import dataclasses

    return {f.name: getattr(record, f.name) for f in dataclasses.fields(record)}


def rebuilt(experiment: Any, changes: dict[str, dict[str, Any]]) -> Any:
    import dataclasses

    return dataclasses.replace(
        experiment, **{name: type(getattr(experiment, name))(**values) for name, values in changes.items()}
    )


def test_text_from_everywhere(home: Path) -> None:
    """Nine sources in one run of the real command: each is read, whole, and gets its share."""
    import fsspec
    import pyarrow
    import pyarrow.parquet
    import zstandard

    folder = home / "sources"
    (folder / "many" / "deep").mkdir(parents=True)
    (folder / "plain.txt").write_text(text(1))
    (folder / "many" / "a.txt").write_text(text(2))
    (folder / "many" / "deep" / "b.md").write_text(text(3))
    (folder / "many" / "c.bin").write_bytes(b"\x00")
    for i in (4, 5):
        (folder / f"globbed_{i}.txt").write_text(text(i))
    lines = ["".join(json.dumps({"text": t}) + "\n" for t in (text(s), text(s + 1))).encode() for s in (10, 20, 30)]
    (folder / "a.jsonl").write_bytes(lines[0])
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(lines[1]))
    (folder / "c.jsonl.zst").write_bytes(zstandard.compress(lines[2]))
    pyarrow.parquet.write_table(pyarrow.table({"text": [text(40), text(41)]}), folder / "d.parquet")
    (folder / "e.txt").write_text(text(50))
    with fsspec.open("memory://here/f.txt", "wb") as file:
        file.write(text(60).encode())
    sources = [
        *("sources/plain.txt", "sources/many", "sources/globbed_*.txt", "sources/a.jsonl", "sources/b.jsonl.gz"),
        *("sources/c.jsonl.zst", "sources/d.parquet", (folder / "e.txt").as_uri(), "memory://here/f.txt"),
    ]
    wanted = [[1], [2, 3], [4, 5], [10, 11], [20, 21], [30, 31], [40, 41], [50], [60]]
    result = done(
        *TRAIN,
        "--workdir=everywhere",
        "--config.data.source=" + ",".join(sources),
        "--config.train.steps=2",
        "--config.train.prompts=",
    )
    origin = json.loads((home / "everywhere" / "provenance.json").read_text())
    found = origin["data"]["sources"]
    assert [s["name"] for s in found] == sources
    for source, seeds in zip(found, wanted, strict=True):
        size = source["train"]["bytes"] + source["validation"]["bytes"]
        assert size == sum(len(text(s).encode()) for s in seeds), source["name"]
    assert result["bytes"] == sum(s["validation"]["bytes"] for s in found)
    assert len(origin["accounting"]) == 9 and sum(a["share"] for a in origin["accounting"]) == pytest.approx(1)


# Processes


def start(home: Path, workdir: str, do: str = ":0", config: str = "acts.py") -> Result:
    """The train command as a process of its own; programs are compiled once for all of them."""
    environment = os.environ | {
        "XLA_FLAGS": "",
        "DO": do,
        "BATCHES": str(home / f"{workdir}.batches"),
        "PYTHONPATH": str(ROOT),
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(home / "programs"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    command = [sys.executable, "-m", "transformer", "train", f"--config={config}", "--cache=cache", "--json"]
    command += [f"--workdir={workdir}", "--config.train.profile=2,3"]
    done = subprocess.run(command, cwd=home, env=environment, capture_output=True, text=True, timeout=300)
    return Result(done.returncode, done.stdout, done.stderr)


def batches(home: Path, workdir: str) -> dict[int, str]:
    """The hash of each step's batch; a step that was done twice had the same batch both times."""
    found: dict[int, str] = {}
    for line in (home / f"{workdir}.batches").read_text().splitlines():
        step, value = line.split()
        assert found.setdefault(int(step), value) == value
    return {step: value for step, value in found.items() if step < 12}


@pytest.fixture(scope="module")
def uninterrupted(home: Path) -> Path:
    found = start(home, "whole")
    assert found.status == 0, found.err
    assert found.out.count("\n") == 1 and json.loads(found.out)["step"] == 12, "progress goes to standard error"
    assert "step 12/12" in found.err and "\x1b" not in found.err
    return home / "whole"


def test_stopped_three_times_and_started_again_it_ends_bit_equal(home: Path, uninterrupted: Path) -> None:
    """K03, K09, D13, O07, R05: SIGTERM, Ctrl-C and a kill in mid-save, each before the same command.

    Parameters, moments, counters, records and batches equal the uninterrupted run's, bit for bit; learning
    rates and the grids of logging, evaluation and saving are on the global step.
    """
    found = start(home, "stopped", "SIGTERM:3")
    assert found.status == 143, found.err
    first = sorted(int(p.name) for p in (home / "stopped" / "checkpoints").iterdir())
    assert f"saved after step {first[-1]}" in found.err and 3 <= first[-1] <= 5 and found.out == ""
    assert not (home / "stopped" / "report.html").exists()

    found = start(home, "stopped", "SIGINT:6")
    assert found.status == 130 and f"going on after step {first[-1]}" in found.err, found.err

    found = start(home, "stopped", "SAVE:8")
    assert found.status == -signal.SIGKILL, found.err

    found = start(home, "stopped")
    assert found.status == 0, found.err
    assert not list((home / "stopped" / "checkpoints").glob("*tmp*")), "what the kill left was cleaned up"
    assert (home / "stopped" / "metrics.jsonl").read_bytes() == (uninterrupted / "metrics.jsonl").read_bytes()
    assert state_of(home / "stopped") == state_of(uninterrupted)
    assert batches(home, "stopped") == batches(home, "whole")
    measured = [json.loads((home / d / "evaluation.json").read_text()) for d in ("stopped", "whole")]
    assert measured[0] | {"run": ""} == measured[1] | {"run": ""}
    assert (home / "stopped" / "samples.json").read_bytes() == (uninterrupted / "samples.json").read_bytes()


def test_the_steps_that_were_asked_for_are_traced(uninterrupted: Path) -> None:
    traces = list((uninterrupted / "profile").rglob("*.xplane.pb"))
    assert len(traces) == 1 and traces[0].stat().st_size > 0


def test_an_evaluation_that_fails_does_not_cost_the_steps_before_it(home: Path, uninterrupted: Path) -> None:
    """K10: it raises after the last step: status 1, the checkpoint of that step exists, and the run can go on."""
    found = start(home, "failed", "FAIL:12")
    assert found.status == 1 and found.err.splitlines()[-1].startswith("failed: RuntimeError: the evaluation failed")
    assert "Traceback" not in found.err
    assert max(int(p.name) for p in (home / "failed" / "checkpoints").iterdir()) == 12
    for a, b in zip(leaves(home / "failed"), leaves(uninterrupted), strict=True):
        assert a.tobytes() == b.tobytes()


def test_a_save_that_does_not_happen_is_an_error(trained: Path, tmp_path: Path) -> None:
    """K05: Orbax passes over a step that is not above the newest in silence."""
    from transformer.training.checkpoint import Checkpoints

    shutil.copytree(trained / "checkpoints", tmp_path / "checkpoints")
    with jax.set_mesh(make_mesh(Mesh())):
        checkpoints = Checkpoints(tmp_path / "checkpoints", KEPT)
        state, progress = checkpoints.restore(open_run(trained).experiment)
        with pytest.raises((RuntimeError, UserError), match="was not saved"):
            checkpoints.save(state._replace(step=state.step - 7), progress)
        checkpoints.close()


def test_what_the_loop_counts_after_a_save_does_not_get_into_it(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D13, R05: saving goes on in the background, while the loop's numbers change: it gets its own."""
    from transformer.training.checkpoint import Checkpoints

    given: list[Any] = []
    with jax.set_mesh(make_mesh(Mesh())):
        old = Checkpoints(trained / "checkpoints", KEPT)
        state, _ = old.restore(open_run(trained).experiment)
        old.close()
        checkpoints = Checkpoints(tmp_path / "checkpoints", KEPT)
        monkeypatch.setattr(checkpoints._manager, "save", lambda step, args, metrics: given.append(args) or True)
        numbers = {"tokens": 5}
        checkpoints.save(state, numbers)
        numbers["tokens"] = 6
        checkpoints.close()
    assert given[0]["progress"].item == {"tokens": 5}


def test_the_best_checkpoint_outlives_newer_ones(trained: Path, tmp_path: Path) -> None:
    """The newest two and the best; one without a measurement, or with one that is no number, is never the best."""
    from transformer.training.checkpoint import Checkpoints

    with jax.set_mesh(make_mesh(Mesh())):
        old = Checkpoints(trained / "checkpoints", KEPT)
        state, _ = old.restore(open_run(trained).experiment)
        old.close()
        checkpoints = Checkpoints(tmp_path / "checkpoints", 2)
        for step, loss in enumerate([3.0, 1.0, float("nan"), 2.0, 5.0, float("inf")], 1):
            checkpoints.save(state._replace(step=np.int32(step)), {"eval_loss": loss, "eval_step": step})
        checkpoints.close()
        assert sorted(int(p.name) for p in (tmp_path / "checkpoints").iterdir()) == [2, 5, 6]
        stale = Checkpoints(tmp_path / "stale", 1)
        for step in (1, 2, 3):  # measured at step 1 alone: the later two carry its number, not their own
            stale.save(state._replace(step=np.int32(step)), {"eval_loss": 1.0, "eval_step": 1})
        stale.close()
        assert sorted(int(p.name) for p in (tmp_path / "stale").iterdir()) == [1, 3]


def test_what_killed_saves_left_is_removed_and_never_counted(tmp_path: Path) -> None:
    """K11: three kills in mid-save."""
    from transformer.training.checkpoint import UNFINISHED, Checkpoints

    for step in (3, 6, 9):
        (tmp_path / f"{step}.orbax-checkpoint-tmp" / "params").mkdir(parents=True)
    assert len(list(tmp_path.glob(UNFINISHED))) == 3
    checkpoints = Checkpoints(tmp_path, KEPT)
    assert checkpoints.newest is None and list(tmp_path.iterdir()) == []
    checkpoints.close()
