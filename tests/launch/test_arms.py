"""python -m launch WHERE --each_arm: the arms of a study as jobs of their own, and one that compares them."""

import json
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from launch import arms
from launch.__main__ import main
from launch.job import NAME
from launch.processes import Group
from tests.launch.checkout import DEFAULT_SIGNALS, arguments, behave, checkout, noted

ARMS = ["baseline", "near zero", "far"]  # of the stand-in's study
RUN = ("--each_arm", "--config=study.py", "--workdir=runs/out", "--name=j", "it's")
RECORD = Path("runs/launch/j/arms.json")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(checkout(tmp_path))
    Path("study.py").write_text("def get_study(): ...\n")
    return tmp_path


def start(*words: str) -> subprocess.Popen[str]:
    command = [*DEFAULT_SIGNALS, sys.executable, "-m", "launch", "local", *RUN, *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def launch(*words: str) -> tuple[int, str, str]:
    process = start(*words)
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err


def begun(*arms: str) -> Callable[[], bool]:
    return lambda: all(Path(f"runs/out/begun-{arm}").exists() for arm in arms)


def test_all_arms_run_at_once_and_then_the_comparison(home: Path) -> None:
    """Each knows its arm and has all other words; the last knows of none, and begins when all have ended."""
    status, out, err = launch()
    assert status == 0 and not RECORD.exists()
    common = [b"study", b"--config=study.py", b"--workdir=runs/out", b"it's"]
    for arm in ARMS:
        assert arguments(Path("runs/out"), arm) == [*common, f"--arm={arm}".encode(), b"--budget_hours=inf"]
    assert arguments(Path("runs/out")) == [*common, b"--budget_hours=inf"]
    lines = out.splitlines()
    began = [i for i, line in enumerate(lines) if " begins at " in line]
    counted = [i for i, line in enumerate(lines) if " has counted to " in line]
    assert max(began[:3]) < min(counted) and max(counted[:3]) < began[3]
    assert lines[-1] == "comparison: process 0 has counted to 60"
    assert sorted(err.splitlines()[:3]) == sorted(f"{arm}: to standard error {arm}" for arm in ARMS)


def test_an_arm_that_fails_leaves_the_others_alone_and_is_launched_again(home: Path) -> None:
    behave(Path("runs/out"), **{"near zero": ["exit 7 0"]})
    status, _, err = launch()
    assert status == 7
    assert err.splitlines()[-1] == (
        "launch: ended 'near zero' with 7; the same command launches these again, and compares when all are done"
    )
    assert noted(Path("runs/out"), "count", "far") == 60 and not begun("0")()
    assert launch()[0] == 0
    assert [noted(Path("runs/out"), "tries", arm) for arm in (*ARMS, "0")] == [1, 2, 1, 1]
    assert not RECORD.exists()


def test_what_is_done_is_of_one_study(home: Path) -> None:
    """Other words are another one: nothing of it is done."""
    behave(Path("runs/out"), far=["exit 7 0"])
    assert launch()[0] == 7
    assert launch("--seeds=9")[0] == 0
    assert [noted(Path("runs/out"), "tries", arm) for arm in ARMS] == [2, 2, 2]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_reaches_every_arm_once_and_nothing_is_compared(home: Path, number: int) -> None:
    behave(Path("runs/out"), **{arm: ["long"] for arm in ARMS})
    process = start()
    deadline = time.monotonic() + 30
    while not begun(*ARMS)():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(number)
    process.communicate(timeout=30)
    assert process.returncode == 128 + number and not begun("0")()
    assert [noted(Path("runs/out"), "received", arm) for arm in ARMS] == [[[number]]] * 3


def test_what_is_done_is_known_after_a_signal_and_after_two_failures(home: Path) -> None:
    """Of four launches: a signal when one arm has ended, a failure, another, and the end. No arm runs again."""
    behave(Path("runs/out"), **{"near zero": ["long", "exit 7 0", "exit 7 0"], "far": ["long", "exit 0 0"]})
    process = start()
    deadline = time.monotonic() + 30
    while "baseline" not in (RECORD.read_text() if RECORD.exists() else ""):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.terminate()
    process.communicate(timeout=30)
    assert process.returncode == 143 and not begun("0")()
    assert [launch()[0] for _ in range(3)] == [7, 7, 0]
    assert [noted(Path("runs/out"), "tries", arm) for arm in (*ARMS, "0")] == [1, 4, 2, 1]


def test_a_signal_that_all_survive_is_no_success(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launched = list[str]()

    def each(group: Group, commands: list[tuple[str, list[str]]], ended: Any = None) -> list[int]:
        launched.extend(name for name, _ in commands)
        group.signals.append(signal.SIGTERM)
        return [0] * len(commands)

    monkeypatch.setattr(Group, "each", each)
    assert main(["local", *RUN]) == 143 and launched == ARMS


def test_a_reader_that_leaves_ends_all(home: Path) -> None:
    """As `| head` does: nobody waits for a pipe that is full."""
    behave(Path("runs/out"), **{arm: ["chatty"] for arm in ARMS})
    with start() as process:
        assert process.stdout is not None and process.stdout.readline()
        process.stdout.close()
        assert process.wait(timeout=60) == 143
        assert process.stderr is not None and "Traceback" not in process.stderr.read()


def test_no_name_of_an_arm_hides_another_job(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launched = list[str]()

    def each(group: Group, commands: list[tuple[str, list[str]]], ended: Any = None) -> list[int]:
        launched.extend(command[4] for _, command in commands)
        return [0] * len(commands)

    monkeypatch.setattr(Group, "each", each)
    monkeypatch.setattr(arms, "_names", lambda arguments: ["baseline", "comparison", ""])
    assert main(["local", *RUN]) == 0
    assert len(set(launched)) == 4 and launched[-1] == "--name=j"


def test_processes_that_cannot_all_be_started_are_none(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arms, "_names", lambda arguments: [str(i) for i in range(40)])
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (60, hard))
    try:
        assert main(["local", *RUN]) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_keys_of_launches_that_begin_at_once_are_one(tmp_path: Path) -> None:
    key = tmp_path / "new" / "key"
    code = f"from pathlib import Path; from launch.cloud_tpu import _make_key; _make_key(Path({str(key)!r}))"
    all_of_them = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(4)]
    assert [process.wait(timeout=60) for process in all_of_them] == [0] * 4 and key.exists()


def test_status_is_of_all(home: Path) -> None:
    found = subprocess.run(
        [sys.executable, "-m", "launch", "local", "status", *RUN], capture_output=True, text=True, check=True
    )
    assert sorted(line.partition(": ")[0] for line in found.stdout.splitlines()) == sorted([*ARMS, "comparison"])
    assert all(line.endswith("not running") for line in found.stdout.splitlines())


def test_a_dry_run_shows_every_job(home: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["local", *RUN, "--dry_run"]) == 0
    heads = [line for line in capfd.readouterr().out.splitlines() if line.startswith("#")]
    assert [head.rpartition(": ")[0] for head in heads] == [
        *(f"# arm {arm!r}" for arm in ARMS),
        "# then the comparison",
    ]
    assert main(["local", *RUN, "--dry_run", "--json"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert list(found["arms"]) == ARMS and "--arm=near zero" in found["arms"]["near zero"]["command"]
    assert "--budget_hours=inf" in found["command"] and not Path("runs").exists()


def test_names_are_names_and_no_two_are_the_same(home: Path) -> None:
    """However long, and where they begin alike or hold nothing that a name may hold."""
    study = "s" * 40
    names = [arms._name(study, arm) for arm in ("a" * 50, "a" * 51, "Ü", "-", "x.y=2, z=3", "x.y=2, z=4", "")]
    assert all(NAME.fullmatch(name) for name in names) and len({*names, study}) == 8
    assert arms._name("other", "-") != arms._name("another", "-")


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--config=config.py"], "--each_arm: train has none; they are a study's"),
        (["--config=study.py", "--arm=far"], "--each_arm: all of them, and --arm is one of them"),
        (["--config=study.py", "--each_arms"], "--each_arms: is no flag of the launcher, and nearly --each_arm"),
    ],
)
def test_what_has_no_arms_is_refused(
    home: Path, words: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["local", "--each_arm", "--workdir=runs/out", *words]) == 2
    assert capsys.readouterr().err.startswith(f"launch: {why}")


@pytest.mark.parametrize("forced", [False, True])
def test_the_plan_is_asked_once(home: Path, monkeypatch: pytest.MonkeyPatch, forced: bool) -> None:
    """Not by every arm on its own: they are told to go on."""
    asked, launched = list[Any](), list[list[str]]()
    monkeypatch.setattr(arms, "refuse_unless_it_fits", lambda *given: asked.append(given[1:4]))

    def each(group: Group, commands: list[tuple[str, list[str]]], ended: Any = None) -> list[int]:
        launched.extend(command for _, command in commands)
        return [0] * len(commands)

    monkeypatch.setattr(Group, "each", each)
    words = ["--topology=v5e:4x4", "--zone=z", "--slices=2", *(["--force"] if forced else [])]
    assert main(["cloud_tpu", *RUN, *words]) == 0
    assert asked == [("v5e:4x4", 2, forced)]
    assert len(launched) == 4 and all(command.count("--force") == 1 for command in launched)


def test_jobs_that_are_not_followed_are_not_compared(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nobody knows when they have ended; the command that compares is said, and the arms do not count as done."""
    launched = list[str]()

    def each(group: Group, commands: list[tuple[str, list[str]]], ended: Any = None) -> list[int]:
        launched.extend(name for name, _ in commands)
        return [0] * len(commands)

    monkeypatch.setattr(Group, "each", each)
    assert main(["slurm", *RUN, "--detach"]) == 0
    assert launched == ARMS and not RECORD.exists()
    said = capsys.readouterr().err
    assert "when all have ended: python -m launch slurm --name=j " in said and "--detach" not in said


@pytest.mark.exhaustive
def test_a_real_study(tmp_path: Path) -> None:
    """Three processes begin in one new directory at once; verdicts are those of the arms one after the other."""
    found = []
    for words in (["launch", "local", "--each_arm"], ["transformer", "study", "--budget_hours=inf"]):
        place = tmp_path / words[0]
        run = ["--config=experiments/planted.py", f"--workdir={place}", "--seeds=2"]
        subprocess.run([sys.executable, "-m", *words, *run], check=True, capture_output=True, timeout=600)
        found.append(json.loads((place / "results.json").read_text())["arms"])
    assert found[0] == found[1]
