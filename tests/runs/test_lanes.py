"""Several runs at once end as each would by itself, to the last bit; also when they were stopped in between."""

import itertools
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.runs.whole import state_of
from transformer import stopping
from transformer.config import load
from transformer.stopping import Stop
from transformer.training.lanes import train_together
from transformer.training.loop import Loop, train

CHANGES = {"train.log_every": "1", "train.accumulate": "2", "model.dropout": "0.2", "train.prompts": ""}


def experiments(count: int, **more: str) -> list[Any]:
    """They differ in seed, order of the text and learning rate; the last one also in its depth and optimizer."""
    each = [{"train.seed": str(i), "data.seed": str(9 - i), "train.learning_rate": f"{i + 1}e-2"} for i in range(count)]
    each[-1] |= {"model.depth": "2", "train.optimizer": "muon"}
    return [load("experiment.py", CHANGES | more | one) for one in each]


def equal(a: Path, b: Path) -> None:
    assert state_of(a) == state_of(b)
    assert (a / "metrics.jsonl").read_bytes() == (b / "metrics.jsonl").read_bytes()
    names = [sorted(p.name for p in (d / "checkpoints").iterdir()) for d in (a, b)]
    assert names[0] == names[1]


def ignore(line: str) -> None:
    pass


@pytest.fixture(scope="module")
def alone(home: Path) -> list[Path]:
    workdirs = [Path(f"alone_{i}") for i in range(3)]
    for experiment, workdir in zip(experiments(3), workdirs, strict=True):
        train(experiment, workdir, Path("cache"), ["test"], ignore)
    return workdirs


def test_lanes_end_as_single_runs_do(alone: list[Path]) -> None:
    """Of three unlike runs on three devices. What is trained is not trained again."""
    together = [Path(f"together_{i}") for i in range(3)]
    assert train_together(experiments(3), together, Path("cache"), ["test"], ignore) == [None] * 3
    for a, b in zip(alone, together, strict=True):
        equal(a, b)
    before = [(p / "metrics.jsonl").stat().st_mtime_ns for p in together]
    assert train_together(experiments(3), together, Path("cache"), ["test"], ignore) == [None] * 3
    assert [(p / "metrics.jsonl").stat().st_mtime_ns for p in together] == before


def test_a_signal_stops_all_lanes_and_each_saves(alone: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes while one is measured, and all go on from where they were."""
    halted = [Path(f"halted_{i}") for i in range(3)]
    evaluate, calls = Loop.evaluate, itertools.count(1)

    def sends(self: Any, params: Any, step: int, asked: Any) -> bool:
        if next(calls) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return evaluate(self, params, step, asked)

    before = [(s, signal.getsignal(s)) for s in stopping.SIGNALS]
    stopping.install()
    try:
        with monkeypatch.context() as patch, pytest.raises(Stop) as stop:
            patch.setattr(Loop, "evaluate", sends)
            train_together(experiments(3), halted, Path("cache"), ["test"], ignore)
    finally:
        for number, handler in before:
            signal.signal(number, handler)
    assert stop.value.status == 143
    newest = [max(int(p.name) for p in (w / "checkpoints").iterdir()) for w in halted]
    assert all(5 <= step <= 6 for step in newest), newest
    assert train_together(experiments(3), halted, Path("cache"), ["test"], ignore) == [None] * 3
    for a, b in zip(alone, halted, strict=True):
        equal(a, b)


def test_a_lane_that_fails_does_not_lose_the_others(alone: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    failing = [Path(f"failing_{i}") for i in range(3)]
    record = Loop.record

    def fails(self: Any, pending: Any) -> None:
        if self.workdir == failing[1] and pending.step == 7:
            raise FloatingPointError("not finite")
        record(self, pending)

    monkeypatch.setattr(Loop, "record", fails)
    ended = train_together(experiments(3), failing, Path("cache"), ["test"], ignore)
    assert ended[0] is None and isinstance(ended[1], FloatingPointError) and ended[2] is None
    equal(alone[0], failing[0])
    equal(alone[2], failing[2])


def test_what_is_unsaved_is_forgotten_when_its_run_leaves() -> None:
    with stopping.deferred("a") as asked:
        with stopping.deferred("b") as shared:
            assert shared is asked
            shared.unsaved |= {"a", "b"}
        assert asked.unsaved == {"a"}
    with stopping.deferred("c") as fresh:
        assert fresh is not asked and not fresh.unsaved and fresh.signal is None
