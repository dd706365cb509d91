"""Processes that are stopped or killed, and started again with the same command."""

import fcntl
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.runs.whole import ROOT, Result, leaves, refused, state_of

STEPS = 12
# Everything that could be lost on the way: dropout, accumulation, several documents in a row, a second epoch.
HARD = ("--config.model.dropout=0.1", "--config.train.accumulate=2", "--config.train.batch=16")
OPTIMIZERS = ("adamw", "muon")


def command(workdir: str, *more: str, config: str = "acts.py") -> list[str]:
    words = ["train", f"--config={config}", "--cache=cache", "--json", f"--workdir={workdir}"]
    return [sys.executable, "-m", "transformer", *words, *more]


def environment(home: Path, workdir: str, do: str) -> dict[str, str]:
    """Programs are compiled once for all processes."""
    return os.environ | {
        "XLA_FLAGS": "",
        "DO": do,
        "BATCHES": str(home / f"{workdir}.batches"),
        "PYTHONPATH": str(ROOT),
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(home / "programs"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }


def start(home: Path, workdir: str, do: str = ":0", *more: str) -> Result:
    """The train command as a process of its own."""
    found = subprocess.run(
        command(workdir, *more),
        cwd=home,
        env=environment(home, workdir, do),
        capture_output=True,
        text=True,
        timeout=300,
    )
    return Result(found.returncode, found.stdout, found.stderr)


def batches(home: Path, workdir: str) -> dict[int, str]:
    """The hash of each step's batch; a step that was done twice had the same batch both times."""
    found: dict[int, str] = {}
    for line in (home / f"{workdir}.batches").read_text().splitlines(keepends=True):
        if line.endswith("\n"):  # a kill may have cut off the last
            step, value = line.split()
            assert found.setdefault(int(step), value) == value
    return {step: value for step, value in found.items() if step < STEPS}


def assert_equal_runs(home: Path, stopped: str, whole: str) -> None:
    """Parameters, moments, counters, records and batches, bit for bit; each step recorded once."""
    metrics = (home / stopped / "metrics.jsonl").read_bytes()
    assert metrics == (home / whole / "metrics.jsonl").read_bytes()
    steps = [r["step"] for r in map(json.loads, metrics.splitlines()) if "loss" in r]
    assert steps == sorted(set(steps))
    assert state_of(home / stopped) == state_of(home / whole)
    assert batches(home, stopped) == batches(home, whole)
    left = [p.name for p in (home / stopped / "checkpoints").iterdir()]
    assert all(name.isdecimal() for name in left), left
    measured = [json.loads((home / d / "evaluation.json").read_text()) | {"run": ""} for d in (stopped, whole)]
    assert measured[0] == measured[1]
    assert (home / stopped / "samples.json").read_bytes() == (home / whole / "samples.json").read_bytes()


@pytest.fixture(scope="module")
def uninterrupted(home: Path) -> Path:
    found = start(home, "whole", ":0", "--config.train.profile=2,3")
    assert found.status == 0, found.err
    assert found.out.count("\n") == 1 and json.loads(found.out)["step"] == STEPS, "progress goes to standard error"
    assert "step 12/12" in found.err and "\x1b" not in found.err
    return home / "whole"


def test_stopped_in_every_phase_and_started_again_it_ends_bit_equal(home: Path, uninterrupted: Path) -> None:
    """K03, K09, D13, O07, R05: signals and kills in a step, in an evaluation, in a save, in the first compilation.

    Learning rates and the grids of logging, evaluation and saving are on the global step.
    """
    more = ("--config.train.profile=2,3", "--cache=cache_of_the_stopped")
    for do, status, words in [
        ("KILL_PREPARE:0", -signal.SIGKILL, ""),
        ("KILL_COMPILE:0", -signal.SIGKILL, ""),
        ("SIGTERM:3", 143, "saved after step"),
        ("SIGINT_EVALUATE:5", 130, "saved after step 5"),
        ("KILL_EVALUATE:5", -signal.SIGKILL, "going on after step 5"),
        ("SIGINT:6", 130, "saved after step"),
        ("SAVE:8", -signal.SIGKILL, "going on after step"),
    ]:
        found = start(home, "stopped", do, *more)
        assert found.status == status and words in found.err, (do, found)
        assert found.out == "" and not (home / "stopped" / "report.html").exists()
    found = start(home, "stopped", ":0", *more)
    assert found.status == 0, found.err
    assert_equal_runs(home, "stopped", "whole")


@pytest.mark.parametrize(
    ("optimizer", "kills"),
    [("muon", 2), *(pytest.param(name, 50, marks=pytest.mark.exhaustive) for name in OPTIMIZERS)],
)
def test_killed_at_random_moments_it_ends_bit_equal(home: Path, optimizer: str, kills: int) -> None:
    """SIGKILL, and now and then SIGTERM or Ctrl-C, wherever the process happens to be."""
    draw = random.Random(f"{optimizer}{kills}")
    change = f"--config.train.optimizer={optimizer}"
    whole, stopped = f"whole_{optimizer}_{kills}", f"stopped_{optimizer}_{kills}"
    begun = time.perf_counter()
    found = start(home, whole, ":0", *HARD, change)
    assert found.status == 0, found.err
    takes = time.perf_counter() - begun
    for number in range(kills):
        process = subprocess.Popen(
            command(stopped, *HARD, change),
            cwd=home,
            env=environment(home, stopped, "SLOW:0"),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        time.sleep(draw.uniform(0.2, 1.1) * takes)
        how = draw.choice([signal.SIGKILL] * 3 + [signal.SIGTERM, signal.SIGINT])
        process.send_signal(how)
        err = process.communicate(timeout=120)[1]
        status = process.returncode
        # It may have ended before; a signal while Python itself starts or ends takes its default way.
        assert status in (0, -how, {signal.SIGTERM: 143, signal.SIGINT: 130}.get(how)), (number, how, status, err)
        assert "failed: " not in err and "error: " not in err, err
    found = start(home, stopped, ":0", *HARD, change)
    assert found.status == 0, found.err
    assert_equal_runs(home, stopped, whole)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_heard_while_a_library_works(home: Path, number: signal.Signals) -> None:
    """Python's handler does not run inside XLA's compiler: where nothing new was trained the process leaves anyway."""
    begun = time.perf_counter()
    found = start(home, f"hang{number.value}", f"HANG_{number.name}:0")
    assert found.status == 128 + number.value and found.err.endswith(f"stopped by {number.name}\n"), found
    assert time.perf_counter() - begun < 60


def test_the_steps_that_were_asked_for_are_traced(uninterrupted: Path) -> None:
    traces = list((uninterrupted / "profile").rglob("*.xplane.pb"))
    assert len(traces) == 1 and traces[0].stat().st_size > 0


def test_an_evaluation_that_fails_does_not_cost_the_steps_before_it(home: Path, uninterrupted: Path) -> None:
    """K10: it raises after the last step: status 1, the checkpoint of that step exists, and the run can go on."""
    found = start(home, "failed", "FAIL:12", "--config.train.profile=2,3")
    assert found.status == 1 and found.err.splitlines()[-1].startswith("failed: RuntimeError: the evaluation failed")
    assert "Traceback" not in found.err
    assert max(int(p.name) for p in (home / "failed" / "checkpoints").iterdir()) == STEPS
    for a, b in zip(leaves(home / "failed"), leaves(uninterrupted), strict=True):
        assert a.tobytes() == b.tobytes()
    assert start(home, "failed", ":0", "--config.train.profile=2,3").status == 0
    assert_equal_runs(home, "failed", "whole")


def test_K02_a_full_disk_stops_the_run_and_costs_no_checkpoint(home: Path, uninterrupted: Path) -> None:
    """Files may not grow beyond some bytes from a step on: as on a full disk, writing fails in the background."""
    found = start(home, "full", "FULL:7", "--config.train.profile=2,3")
    assert found.status == 1 and found.err.splitlines()[-1].startswith("failed: OSError: "), found.err
    assert ": cannot be written: " in found.err or ": the checkpoint could not be written: " in found.err, found.err
    assert "Traceback" not in found.err
    assert start(home, "full", ":0", "--config.train.profile=2,3").status == 0
    assert_equal_runs(home, "full", "whole")


def test_two_processes_never_train_in_one_directory(home: Path, uninterrupted: Path) -> None:
    handle = os.open(uninterrupted, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        found = start(home, "whole", ":0", "--config.train.profile=2,3")
        assert found.status == 2 and "another process trains in whole" in found.err.splitlines()[-1]
    finally:
        os.close(handle)


def test_skipped_updates_keep_their_place_and_end_the_run(home: Path) -> None:
    """A loss that is not finite from step 6 on: two updates are skipped whole, both are named; then it ends."""
    found = start(home, "spike", "NAN:6", "--config.train.max_skipped=2", "--config.train.log_every=1")
    assert found.status == 1 and "2 steps in a row were skipped" in found.err.splitlines()[-1], found.err
    assert "runs reproduce --run=spike --step=6" in found.err
    records = [json.loads(line) for line in (home / "spike" / "metrics.jsonl").read_text().splitlines()]
    skipped = {r["step"]: r for r in records if r.get("batch")}
    assert list(skipped) == [6, 7] and [r["skipped"] for r in skipped.values()] == [1, 2]
    assert skipped[6]["batch"] == batches(home, "spike")[5]
    assert skipped[6]["tokens"] == skipped[7]["tokens"] == next(r["tokens"] for r in records if r["step"] == 5)


def test_one_step_can_be_run_again(home: Path, uninterrupted: Path) -> None:
    """From the checkpoint before it, or from the start; equal to the record to the last bit."""
    for step in (2, 12):
        words = ["runs", "reproduce", "--run=whole", f"--step={step}", "--cache=cache", "--json"]
        found = subprocess.run(
            [sys.executable, "-m", "transformer", *words],
            cwd=home,
            env=environment(home, "again", ":0"),
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert found.returncode == 0, found.stderr
        result = json.loads(found.stdout)
        assert result["equals_record"] is True and result["batch"] == batches(home, "whole")[step - 1]
        assert len(result["rows"]) == 4 and all(r["tokens"] > 0 for r in result["rows"])
        total = sum(w["gradient_norm"] ** 2 for w in result["weights"]) ** 0.5
        assert total == pytest.approx(result["metrics"]["grad_norm"], rel=1e-5)
    assert "is not one of the run's steps 1 to 12" in refused("runs", "reproduce", "--run=whole", "--step=13")
    assert "is no action (did you mean 'reproduce'?)" in refused("runs", "reprodce", "--run=whole", "--step=1")
