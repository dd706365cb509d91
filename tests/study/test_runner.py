"""Whole studies: planted differences, executables shared, failures, changes, kills."""

import dataclasses
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import jax
import pytest

from tests.runs.whole import ROOT, content, inside, refused, run
from tests.runs.whole import text as words
from transformer.errors import UserError
from transformer.files import alone, in_turn
from transformer.study import runner as runners
from transformer.study.runner import Failed, Runner
from transformer.study.study import AGAIN, Study
from transformer.training import lanes

FILE = """
from transformer.config import Experiment
from transformer.data.prepare import Data
from transformer.data.tokenizer import Bytes
from transformer.model.config import Model
from transformer.study.study import Study
from transformer.training.config import Train

def get_study():
    return Study(
        question="Is a learning rate near zero worse?",
        baseline=Experiment(
            model=Model(depth=1, width=16, heads=2, context=16),
            tokenizer=Bytes(),
            data=Data(source="text.txt", piece_bytes=256),
            train=Train(steps=12, batch=4, learning_rate=3e-2, warmup=2, eval_every=6, checkpoint_every=3, prompts=()),
        ),
        arms={"near zero": {"train.learning_rate": 1e-7}},
        seeds=(0, 1, 2),
        again=True,
        lanes=1,
    )
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A working directory with a study and its text."""
    folder = tmp_path_factory.mktemp("home")
    (folder / "file.py").write_text(FILE)
    (folder / "text.txt").write_text(words(0))
    with inside(folder):
        yield folder


def read(changes: dict[str, str] | None = None, **fields: Any) -> Study:
    from transformer.study.study import load

    return load("file.py", changes or {}, **fields)


def results(study: Study, workdir: str, said: list[str] | None = None, arm: str | None = None) -> dict[str, Any]:
    lines = [] if said is None else said
    return Runner(study, Path(workdir), Path("cache"), ["test"], lines.append, arm).run()


@pytest.fixture(scope="module")
def whole(home: Path) -> Any:
    """The study, run to its end, and how many programs each of its runs compiled."""
    compiled: list[int] = []
    count = 0

    def listen(name: str, seconds: float, **more: Any) -> None:
        nonlocal count
        count += name == "/jax/core/compile/backend_compile_duration"

    one = Runner.one

    def counted(self: Runner, *args: Any) -> Any:
        found = one(self, *args)
        compiled.append(count - sum(compiled))  # since the run before was measured
        return found

    jax.monitoring.register_event_duration_secs_listener(listen)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Runner, "one", counted)
        found = results(read(), "whole")
    jax.monitoring.unregister_event_duration_listener(listen)
    return found, compiled


def arm(found: dict[str, Any], name: str) -> Any:
    return next(row for row in found["arms"] if row["name"] == name)


def test_verdicts_on_planted_differences_are_right(whole: Any) -> None:
    """A learning rate near zero is worse; the baseline itself under other seeds is not resolved."""
    found, _ = whole
    assert arm(found, "near zero")["comparison"]["verdict"] == "worse"
    assert arm(found, AGAIN)["comparison"]["verdict"] == "not resolved"
    values = {row["name"]: [row["seeds"][str(s)]["bits_per_byte"] for s in range(3)] for row in found["arms"]}
    assert len({x for row in values.values() for x in row}) == 9, "every run is a run of its own"
    assert min(values["near zero"]) > max(values["baseline"]) + 0.5
    assert json.loads(Path("whole/results.json").read_text()) == json.loads(json.dumps(found))


def test_runs_that_differ_in_seed_and_learning_rate_share_one_executable(whole: Any) -> None:
    """Only the first of the nine runs compiles anything."""
    _, compiled = whole
    assert len(compiled) == 9 and compiled[0] > 2 and not any(compiled[1:]), compiled


def test_lanes_change_nothing(whole: Any, home: Path) -> None:
    """Four runs at once, each on a device of its own: the same results, to the last digit."""
    assert results(read(lanes=4), "lanes")["arms"] == whole[0]["arms"]
    for file in ("metrics.jsonl", "result.json"):
        for one in Path("whole/arms").rglob(file):
            assert one.read_bytes() == Path("lanes", one.relative_to("whole")).read_bytes(), one


def test_arms_that_are_run_one_by_one_give_the_same_study(whole: Any, home: Path) -> None:
    """Two are held by processes of their own; the last, and then the whole study, finds what they left."""
    for name in ("near zero", "baseline"):
        found = results(read(), "parts", arm=name)
        assert found["arms"] == [{k: v for k, v in arm(whole[0], name).items() if k not in ("comparison", "in_words")}]
        assert not Path("parts/results.json").exists() and not Path("parts/report.html").exists()
    assert not list(Path("parts/arms").glob("*again*"))
    with alone(Path("parts"), shared=True), alone(Path("parts/arms/baseline")):
        with pytest.raises(UserError, match="another process trains in parts"):
            results(read(), "parts")
        with pytest.raises(UserError, match="another process trains in parts/arms/baseline"):
            results(read(), "parts", arm="baseline")
        results(read(), "parts", arm=AGAIN)
    assert results(read(), "parts")["arms"] == whole[0]["arms"]
    for one in Path("whole/arms").rglob("metrics.jsonl"):
        assert one.read_bytes() == Path("parts", one.relative_to("whole")).read_bytes(), one


def test_what_another_arm_has_just_begun_is_in_nobodys_way(home: Path) -> None:
    """Its study.json is half written, in a lock that this one waits for."""
    Path("at_once").mkdir()
    Path("at_once/study.json.tmp").write_text("{")
    turn, waits = in_turn(Path("at_once/study.log")), threading.Event()

    def other() -> None:
        with turn:
            waits.set()
            time.sleep(0.5)
            Path("at_once/study.json.tmp").unlink()
            seen.append(Path("at_once/study.json").exists())

    seen = list[bool]()
    thread = threading.Thread(target=other)
    thread.start()
    waits.wait()
    assert results(read(), "at_once", arm="near zero")["arms"]
    thread.join()
    assert seen == [False]
    Path("odd/study.log").mkdir(parents=True)
    with pytest.raises(UserError, match=r"--workdir: cannot write to odd/study\.log: Is a directory"):
        results(read(), "odd", arm="near zero")


def test_an_arm_that_cannot_be_run_alone_is_refused(home: Path) -> None:
    with pytest.raises(UserError, match=r"--arm: 'near zer' is no arm of this study \(did you mean 'near zero'\?\)"):
        results(read(), "none", arm="near zer")
    with pytest.raises(UserError, match=r"--arm: .*; set --budget_hours=inf"):
        results(read(budget_hours=1.0), "none", arm="near zero")
    assert not Path("none").exists()


def test_what_is_finished_is_not_run_again(whole: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    before = content(Path("whole"))

    def never(*args: Any) -> Any:
        raise AssertionError("trained again")

    monkeypatch.setattr(runners, "train_together", never)
    assert results(read(), "whole") == json.loads(json.dumps(whole[0]))
    assert content(Path("whole")) == before


def test_an_arm_that_fails_does_not_lose_the_others(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that diverges is a result; an error is tried again by the same command."""
    said: list[str] = []
    training, broken = lanes.training, True

    def fails(experiment: Any, directory: Path, *args: Any) -> Any:
        if broken and "near_zero/seed_1" in str(directory):
            raise OSError("no room")
        yield from training(experiment, directory, *args)

    monkeypatch.setattr(lanes, "training", fails)
    changes = {"train.max_skipped": "2", "train.clip": "none"}
    study = read(changes)
    arms = {"near zero": {"train.learning_rate": 1e-7}, "far out": {"train.learning_rate": 1e30}}
    study = study.__class__(
        **{f: getattr(study, f) for f in study.__dataclass_fields__} | {"arms": arms, "again": False}
    )
    with pytest.raises(Failed, match=r"near_zero/seed_1: OSError: no room; the same command tries these again"):
        results(study, "failing", said)
    found = json.loads(Path("failing/results.json").read_text())
    assert arm(found, "near zero")["comparison"]["seeds"] == [0, 2]
    assert arm(found, "near zero")["comparison"]["left_out"] == [1]
    far = arm(found, "far out")
    assert all("2 steps in a row were skipped" in far["seeds"][str(s)]["failed"] for s in range(3))
    assert far["comparison"]["verdict"] == "not resolved" and far["mean"] is None
    broken = False
    found = results(study, "failing", said)
    assert arm(found, "near zero")["comparison"]["seeds"] == [0, 1, 2]
    assert any("failing/arms/near_zero/seed_1: OSError: no room" in line for line in said)


def test_a_study_with_a_failed_run_says_what_it_found_all_the_same(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    training = lanes.training

    def fails(experiment: Any, directory: Path, *args: Any) -> Any:
        if "near_zero/seed_1" in str(directory):
            raise UserError("something that is known now alone")
        yield from training(experiment, directory, *args)

    monkeypatch.setattr(lanes, "training", fails)
    found = run("study", "--config=file.py", "--cache=cache", "--workdir=partly", "--seeds=2", "--config.train.steps=3")
    assert found.status == 1 and "baseline" in found.out and "the report: open partly/report.html" in found.out
    last = found.err.splitlines()[-1]
    assert last.startswith("failed: partly: partly/arms/near_zero/seed_1: something that is known now alone; the same")


def test_what_cannot_work_in_one_arm_is_refused_before_anything_is_trained(home: Path) -> None:
    (home / "gone.py").write_text(FILE.replace('{"train.learning_rate": 1e-7}', '{"train.init_from": "nowhere"}'))
    assert refused("study", "--config=gone.py", "--cache=cache", "--workdir=gone") == (
        "error: nowhere: is not a run's directory (it has no config.json)"
    )
    assert "two are needed" in refused("noise", "--config=file.py", "--cache=cache", "--workdir=gone", "--seeds=1")
    assert not (home / "gone").exists()


def test_a_changed_arm_is_a_new_run_and_the_old_one_stays(whole: Any) -> None:
    before = {p: p.stat().st_mtime_ns for p in Path("whole/arms").rglob("result.json")}
    said: list[str] = []
    found = results(read({"train.steps": "6"}, seeds=(0,)), "whole", said)
    assert all(p.stat().st_mtime_ns == time_ for p, time_ in before.items()) and len(before) == 9
    assert sorted(p.name for p in Path("whole/arms/baseline").iterdir())[1].startswith("seed_0.")
    assert found["arms"][0]["seeds"]["0"]["step"] == 6
    assert any("the study has changed in seeds, arms" in line for line in said)
    Path("whole/results.json").write_text(json.dumps(whole[0]))


@pytest.mark.exhaustive
def test_each_arm_takes_its_best_learning_rate(home: Path) -> None:
    said: list[str] = []
    study = read(learning_rates=(1e-7, 3e-2, 10.0), tuning_seed=9, arms={"MLP of 24": {"model.mlp.width": 24}})
    accept = ("parameters", "block_parameters", "flops")
    study = dataclasses.replace(study, accept=accept, again=False, seeds=(0,))
    found = results(study, "tuned", said)
    for row in found["arms"]:
        tuned = row["learning_rate"]
        values = {rate: value for rate, value in tuned["found"].items() if value is not None}
        assert set(tuned["found"]) == {"1e-07", "0.03", "10"} and len(values) >= 2
        assert tuned["chosen"] == 0.03 and not tuned["at_the_edge"]
        folder = row["name"].replace(" ", "_")
        config = json.loads(Path(f"tuned/arms/{folder}/seed_0/config.json").read_text())
        assert config["train"]["learning_rate"] == 0.03
    narrow = read(learning_rates=(1e-7, 1e-5), tuning_seed=9, arms={}, seeds=(0,), again=False)
    found = results(narrow, "edge", said)
    assert found["arms"][0]["learning_rate"]["at_the_edge"] and any("at the edge" in line for line in said)


def test_directories_that_hold_something_else_are_left_alone(home: Path, whole: Any) -> None:
    Path("other").mkdir()
    Path("other/mine.txt").write_text("mine")
    assert "holds no study" in refused("study", "--config=file.py", "--cache=cache", "--workdir=other")
    assert content(Path("other")) == {"mine.txt": b"mine"}
    for changes, phrase in [
        (["--seeds=none"], "--seeds: none"),
        (["--seeds=0"], "--seeds: 0"),
        (["--equal=flops"], "study.equal"),
        (["--budget_hours=0"], "--budget_hours: 0 is not above 0"),
        (["--arm=nobody"], "--arm: 'nobody' is no arm of this study"),
        (["--config.model.heads=3"], "config.model.heads"),
    ]:
        assert phrase in refused("study", "--config=file.py", "--cache=cache", "--workdir=new", *changes)
        assert not Path("new").exists()


def test_a_study_that_another_process_runs_is_left_as_it_is(home: Path, whole: Any) -> None:
    before = content(Path("whole"))
    with alone(Path("whole")), pytest.raises(UserError, match="another process trains in whole"):
        results(read(seeds=(0,)), "whole")
    with pytest.raises(UserError, match=r"--arm: whole holds a study of other (seeds, )?arms; `study` without"):
        results(read({"train.steps": "7"}, seeds=(0,)), "whole", arm="near zero")
    assert content(Path("whole")) == before


def start(workdir: str) -> subprocess.Popen[str]:
    words = ["study", "--config=file.py", "--cache=cache", f"--workdir={workdir}", "--json"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "XLA_FLAGS": "--xla_backend_optimization_level=0"}
    return subprocess.Popen(
        [sys.executable, "-m", "transformer", *words],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("kills", [1, pytest.param(30, marks=pytest.mark.exhaustive)])
def test_killed_at_random_moments_it_ends_with_the_same_results(home: Path, kills: int) -> None:
    begun = time.perf_counter()
    out, err = start(f"calm_{kills}").communicate(timeout=600)
    takes = time.perf_counter() - begun
    assert json.loads(out), err
    draw = random.Random(kills)
    for _ in range(kills):
        process = start(f"killed_{kills}")
        time.sleep(draw.uniform(0.3, 0.9) * takes)
        process.send_signal(draw.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGTERM]))
        _, err = process.communicate(timeout=120)
        assert process.returncode in (0, -signal.SIGKILL, -signal.SIGTERM, 143), err
        assert "failed: " not in err and "error: " not in err, err
    out, err = start(f"killed_{kills}").communicate(timeout=600)
    for name in ("results.json", "study.json"):
        assert Path(f"killed_{kills}", name).read_bytes() == Path(f"calm_{kills}", name).read_bytes(), err
    assert json.loads(out) == json.loads(Path(f"killed_{kills}/results.json").read_text())


def test_noise_says_what_seeds_alone_do(home: Path) -> None:
    words = ("noise", "--config=file.py", "--cache=cache", "--workdir=noisy", "--seeds=3", "--effect=0.01")
    found = run(*words, "--json")
    assert found.status == 0, found.err
    result = json.loads(found.out)
    values = list(result["values"].values())
    mean = sum(values) / 3
    assert result["mean"] == pytest.approx(mean)
    assert result["sd"] == pytest.approx((sum((x - mean) ** 2 for x in values) / 2) ** 0.5)
    assert (result["effect"] == 0.01 and result["seeds_needed"] is None) or result["seeds_needed"] > 1
    assert "bits per byte" in run(*words).out


def test_what_does_not_fit_the_budget_is_dropped_once_and_said(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last arms first; a study that goes on keeps to what it began with, whatever the clock says now."""
    hours = {"baseline": 1.0, "a": 1.0, "b": 1.0, "c": 0.5}
    monkeypatch.setattr(runners, "price", lambda study, arms, tokens: dict(hours))
    arms = {name: {"train.learning_rate": 10.0**-i} for i, name in enumerate("abc", 2)}
    study = dataclasses.replace(read(seeds=(0,)), arms=arms, again=False, budget_hours=2.6)
    said: list[str] = []
    found = results(study, "budget", said)
    assert [row["name"] for row in found["arms"]] == ["baseline", "a"]
    assert "dropped, as they do not fit: b, c" in said and "about 2.00 hours of 2.6" in said
    assert json.loads(Path("budget/study.json").read_text())["dropped"] == ["b", "c"]
    hours["a"] = 5.0
    assert results(study, "budget") == found
    with pytest.raises(UserError, match=r"2\.6 hours do not pay for baseline and one arm \(1\.0 and 5\.0 hours here\)"):
        results(study, "budget_again")
    assert not Path("budget_again").exists()


def test_a_study_is_priced_before_it_starts(home: Path) -> None:
    found = run("cost", "--config=file.py", "--cache=cache", "--json")
    assert found.status == 0, found.err
    result = json.loads(found.out)
    assert set(result["hours"]) == {"baseline", "near zero", AGAIN}
    assert all(0 < hours < 0.1 for hours in result["hours"].values())
    assert "3 seeds, 0 learning rates" in run("cost", "--config=file.py", "--cache=cache").out
