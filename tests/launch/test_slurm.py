"""python -m launch slurm, driven for real: a Slurm of two nodes on this machine runs what the launcher makes."""

import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.launch import slurm_cluster
from tests.launch.checkout import ROOT, TINY, arguments, behave, checkout, needs_hosts, noted
from tests.launch.slurm_cluster import cluster

pytestmark = [pytest.mark.exhaustive, pytest.mark.skipif(bool(slurm_cluster.NEEDS), reason=slurm_cluster.NEEDS)]
PLACE = "slurm"


@pytest.fixture(scope="module")
def env(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    with cluster(tmp_path_factory.mktemp("slurm")) as variables:
        clean = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        yield {**clean, **variables, "PYTHONDONTWRITEBYTECODE": "1"}


@pytest.fixture
def home(tmp_path: Path, env: dict[str, str]) -> Iterator[Path]:
    yield checkout(tmp_path / "a %j checkout")
    subprocess.run(["scancel", "--user=root"], env=env, check=True)
    until(lambda: not queue(env))


def start(home: Path, env: dict[str, str], *words: str | bytes, tasks: int = 2) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "launch", PLACE, *words, f"--nodes={tasks}"]
    return subprocess.Popen(command, cwd=home, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def launch(home: Path, env: dict[str, str], *words: str | bytes, tasks: int = 2) -> tuple[int, str, str]:
    process = start(home, env, *words, tasks=tasks)
    out, err = process.communicate(timeout=100)
    return process.returncode, out.decode(errors="replace"), err.decode(errors="replace")


RUN = ("--config=config.py", "--workdir=runs/out", "--name=j")


def queue(env: dict[str, str]) -> list[str]:
    listed = subprocess.run(["squeue", "-h", "-o", "%i %T"], env=env, capture_output=True, check=True, text=True)
    return listed.stdout.splitlines()


def until(true: Callable[[], object], seconds: float = 40) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "it never came to that"
        time.sleep(0.1)


def began(home: Path, process: int = 0) -> bool:
    return (home / "runs/out" / f"begun-{process}").exists()


AWKWARD: list[str | bytes] = ["--a=a;b", "x,y", "it's", "$HOME $(id)", "a b", "line\nbreak", "", "*", "~", '"', "\\"]
AWKWARD += ["é", b"\xff\xfe", "\r\n", "\r", "'\r'", "a\n#SBATCH --nodes=99\n", "!x", "#", "`id`", "%j", "\t", "\x01"]


def test_arguments_reach_every_task_unchanged(home, env):
    status, out, err = launch(home, env, *RUN, *AWKWARD)
    assert status == 0, err
    for task in (0, 1):
        assert arguments(home / "runs/out", task) == [b"train", b"--config=config.py", b"--workdir=runs/out"] + [
            os.fsencode(word) for word in AWKWARD
        ]
    assert out == "process 0 begins at 0\nprocess 0 has counted to 60\n", "more than what the first task prints"
    assert "1: process 1 has counted to 60\n" in err and "1: to standard error 1\n" in err


def test_a_job_that_is_sent_sigterm_is_queued_again_and_resumes(home, env):
    process = start(home, env, *RUN)
    until(lambda: began(home, 0) and began(home, 1))
    time.sleep(0.5)
    (number,) = {line.split()[0] for line in queue(env)}
    subprocess.run(["scancel", "--signal=TERM", number], env=env, check=True)
    _, err = process.communicate(timeout=100)
    assert process.returncode == 0, err
    for task in (0, 1):
        assert noted(home / "runs/out", "received", task) == [[signal.SIGTERM]], "the signal came more than once"
        first, second = noted(home / "runs/out", "begun", task)
        assert first == 0 < second
        assert noted(home / "runs/out", "count", task) == 60
    assert b"exit status 143: back into the queue" in err and b"attempt 2 of 20" in err
    assert (home / f"runs/launch/j/{number}.log").read_bytes() in err, "what is shown is not what is in the log"


def test_a_killed_task_is_tried_again_whatever_the_others_say_later(home, env):
    behave(home / "runs/out", _1=["exit 1 2.5"])
    process = start(home, env, *RUN)
    until(lambda: began(home, 0) and (home / "runs/out/pid-0").exists())
    os.kill(noted(home / "runs/out", "pid", 0), signal.SIGKILL)
    err = process.communicate(timeout=100)[1].decode()
    assert process.returncode == 0, err
    assert "exit status 137: back into the queue" in err
    assert noted(home / "runs/out", "tries", 0) == noted(home / "runs/out", "tries", 1) == 2


def test_a_users_error_is_final_though_another_task_is_terminated_later(home, env):
    behave(home / "runs/out", _0=["exit 2 0"], _1=["exit 143 1"])
    status, _, err = launch(home, env, *RUN)
    assert status == 2, err
    assert "queue" not in err and noted(home / "runs/out", "tries") == 1
    assert launch(home, env, "status", "--name=j")[1].endswith("has ended with exit status 2\n")


def test_attempts_have_an_end(home, env):
    behave(home / "runs/out", _0=["exit 143 0"] * 9, _1=["exit 143 0"] * 9)
    status, _, err = launch(home, env, *RUN, "--attempts=2")
    assert status == 143
    assert "after attempt 2: given up" in err and noted(home / "runs/out", "tries") == 2


def test_chip_hours_have_an_end(home, env):
    behave(home / "runs/out", _0=["exit 143 6"] * 9, _1=["exit 143 6"] * 9)
    status, _, err = launch(home, env, *RUN, "--chip_hours=0.0001")  # 0.18 s on two nodes
    assert status == 143
    assert "after its chip-hours: given up" in err and noted(home / "runs/out", "tries") == 1


def test_a_second_launch_finds_the_first(home, env):
    first = start(home, env, *RUN)
    until(lambda: began(home))
    status, out, _ = launch(home, env, *RUN, "--detach")
    (line,) = queue(env)
    assert (status, out.split()) == (0, line.split()[:1])
    status, _, err = launch(home, env, *RUN, "--config.train.steps=9")
    assert status == 2 and err.count("\n") == 1 and "other arguments" in err
    status, out, err = launch(home, env, *RUN)
    assert status == 0 and "already, running" in err and out.endswith("counted to 60\n")
    first.communicate(timeout=100)
    assert first.returncode == 0
    assert noted(home / "runs/out", "tries") == 1


def test_a_job_that_was_cancelled_is_not_started_again(home, env):
    for cancel in ("launch", "scancel"):
        shutil.rmtree(home / "runs/out", ignore_errors=True)
        process = start(home, env, *RUN)
        until(lambda: began(home, 0) and began(home, 1))
        assert "running" in launch(home, env, "status", "--name=j")[1]
        if cancel == "launch":
            assert launch(home, env, "stop", "--name=j")[0] == 0
        else:
            subprocess.run(["scancel", "--name=j"], env=env, check=True)
        process.communicate(timeout=100)
        assert process.returncode == 143
        until(lambda: not queue(env))
        time.sleep(2)
        assert not queue(env)
        assert noted(home / "runs/out", "received") == [[signal.SIGTERM]] and noted(home / "runs/out", "tries") == 1
        assert list((home / "runs/launch/j").glob("*.log"))


def test_a_job_that_never_came_to_speak_ends_as_slurm_says(home, env):
    number = launch(home, env, *RUN, "--detach", "--sbatch=--hold")[1].strip()
    subprocess.run(["scancel", number], env=env, check=True)
    until(lambda: not queue(env))
    status, out, err = launch(home, env, "status", "--name=j")
    assert (status, out) == (0, f"j: job {number} has ended with exit status 143\n") and "CANCELLED" in err


def test_somebody_elses_job_of_the_same_name_is_left_alone(home, env):
    subprocess.run(["sbatch", "--job-name=j", "--wrap=sleep 60", "--output=/dev/null"], env=env, check=True, cwd=home)
    for words in (["stop"], ["status"], []):
        status, _, err = launch(home, env, *words, *RUN)
        assert status == 2 and err.count("\n") == 1 and "was not launched here" in err
    assert len(queue(env)) == 1


def test_a_queued_job_runs_the_code_that_was_launched(home, env):
    number = launch(home, env, *RUN, "--detach", "--sbatch=--hold")[1].strip()
    (home / "transformer/__main__.py").write_text("raise SystemExit(9)\n")
    subprocess.run(["scontrol", "release", number], env=env, check=True)
    assert launch(home, env, "logs", "--name=j")[0] == 0
    assert noted(home / "runs/out", "count") == 60
    assert launch(home, env, *RUN)[0] == 9  # with the new code, and the same place for its outputs
    assert noted(home / "runs/out", "tries") == 1


def test_code_that_was_changed_after_the_launch_is_refused(home, env):
    number = launch(home, env, *RUN, "--detach", "--sbatch=--hold")[1].strip()
    (copy,) = (home / "runs/launch/.code").glob("*/transformer/__main__.py")
    copy.write_text(copy.read_text() + "\n")
    subprocess.run(["scontrol", "release", number], env=env, check=True)
    out = launch(home, env, "logs", "--name=j")[1]
    assert "is not as it was launched" in out and not began(home)
    assert launch(home, env, "status", "--name=j")[1].endswith("exit status 2\n")


def test_the_time_limit_is_announced_and_the_job_goes_on(home, env):
    """Slurm looks at the clock every half minute."""
    behave(home / "runs/out", _0=["long"], _1=["long"])
    status, _, err = launch(home, env, *RUN, "--time=1")
    assert status == 0, err
    assert noted(home / "runs/out", "received") == [[signal.SIGTERM]] and noted(home / "runs/out", "tries") == 2
    assert noted(home / "runs/out", "begun")[1] > 20, "it did not go on from where it was"


def test_what_sbatch_refuses_is_one_line(home, env):
    status, _, err = launch(home, env, *RUN, "--partition=moon")
    assert status == 2 and err.count("\n") == 1 and "invalid partition" in err


JAX = """
import jax
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(initialization_timeout=60)
from jax.experimental.multihost_utils import process_allgather
import numpy
print("gathered", process_allgather(numpy.array([10 + jax.process_index()])).ravel().tolist(), flush=True)
"""


def test_jax_finds_its_processes_by_itself(home, env):
    (home / "transformer/__main__.py").write_text(JAX)
    status, out, err = launch(home, env, *RUN)
    assert status == 0, err
    assert out.splitlines()[-1] == "gathered [10, 11]"


def has_lines(path: Path) -> bool:
    return path.exists() and path.read_text().count("\n") >= 2


@needs_hosts
def test_a_real_training_run_on_two_tasks_resumes_and_ends_as_one_that_was_never_stopped(tmp_path, env):
    records, flags = {}, ["--name=tiny", "--workdir=runs/tiny", f"--cache={tmp_path}/cache"]
    for stopped in (True, False):
        home = tmp_path / str(stopped)
        shutil.copytree(ROOT / "launch", home / "launch", ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("transformer", "experiments"):
            shutil.copytree(ROOT / name, home / name, ignore=shutil.ignore_patterns("__pycache__"))
        (home / ".gitignore").write_text("/runs/\n__pycache__/\n")
        subprocess.run(["git", "init", "-q"], cwd=home, check=True)
        process = start(home, {**env, "JAX_PLATFORMS": "cpu"}, *TINY, "--json", *flags)
        metrics = home / "runs/tiny/metrics.jsonl"
        if stopped:
            until(functools.partial(has_lines, metrics), seconds=150)
            number = queue(env)[0].split()[0]
            subprocess.run(["scancel", "--signal=TERM", number], env=env, check=True)
        out, err = process.communicate(timeout=240)
        assert process.returncode == 0, err.decode()
        assert json.loads(out)["step"] == 150
        assert (b"back into the queue" in err) == stopped
        records[stopped] = metrics.read_bytes()
    assert records[True] == records[False]


def test_each_arm_of_a_study_is_a_job_and_the_comparison_another(home, env):
    """Three jobs at once; the last begins when all have ended."""
    (home / "study.py").write_text("def get_study(): ...\n")
    words = ("--each_arm", "--config=study.py", "--workdir=runs/out", "--name=j")
    process = start(home, env, *words, tasks=1)
    until(lambda: len([line for line in queue(env) if line.endswith("RUNNING")]) == 3)
    out, err = (text.decode() for text in process.communicate(timeout=100))
    assert process.returncode == 0, err
    arms = ("baseline", "near zero", "far")
    for arm in arms:
        assert noted(home / "runs/out", "count", arm) == 60 and f"{arm}: process {arm} has counted to 60" in out
    ended = [(home / "runs/out" / f"count-{arm}").stat().st_mtime for arm in arms]
    assert (home / "runs/out/begun-0").stat().st_mtime > max(ended)
    assert len({path.name for path in (home / "runs/launch").iterdir() if path.name[0] != "."}) == 4
