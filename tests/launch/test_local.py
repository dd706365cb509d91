"""python -m launch local --processes=N, seen from outside: several processes as one job."""

import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.launch.checkout import DEFAULT_SIGNALS, ROOT, TINY, arguments, behave, checkout, needs_hosts, noted

RUN = ("--config=config.py", "--workdir=runs/out", "--name=j")


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return checkout(tmp_path)


def start(home: Path, *words: str) -> subprocess.Popen[bytes]:
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "SLURM_PROCID")}
    return subprocess.Popen(
        [*DEFAULT_SIGNALS, sys.executable, "-m", "launch", "local", *words],
        cwd=home,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,  # so that a test can play the terminal, which signals a whole group
    )


def launch(home: Path, *words: str) -> tuple[int, str, str]:
    process = start(home, *words)
    out, err = process.communicate(timeout=60)
    return process.returncode, out.decode(), err.decode()


def until(true: Callable[[], object]) -> None:
    deadline = time.monotonic() + 30
    while not true():
        assert time.monotonic() < deadline, "it never came to that"
        time.sleep(0.02)


def began(home: Path, count: int) -> bool:
    return all((home / "runs/out" / f"begun-{i}").exists() for i in range(count))


def alive(home: Path, process: int) -> bool:
    try:
        os.kill(noted(home / "runs/out", "pid", process), 0)
    except ProcessLookupError:
        return False
    return True


def test_processes_know_of_each_other_and_get_the_arguments_unchanged(home):
    words = ["it's", "a b", "", "line\nbreak", "$HOME"]
    status, out, err = launch(home, *RUN, "--processes=3", *words)
    assert status == 0
    expected = [os.fsencode(word) for word in (*RUN[:2], *words)]
    coordinators = set()
    for i in range(3):
        command, coordinator, *rest = arguments(home / "runs/out", i)
        assert (command, rest) == (b"train", [b"--processes=3", b"--process=%d" % i, *expected])
        coordinators.add(coordinator)
    (coordinator,) = coordinators
    assert coordinator.startswith(b"--coordinator=127.0.0.1:")
    assert out == "process 0 begins at 0\nprocess 0 has counted to 60\n"
    assert sorted(err.splitlines()) == [f"{i}: to standard error {i}" for i in range(3)]


def test_a_dry_run_of_several_can_be_pasted_into_a_shell(home):
    status, out, _ = launch(home, *RUN, "--processes=2", "it's", "--dry_run")
    assert status == 0 and not (home / "runs").exists()
    subprocess.run(["sh", "-c", out], cwd=home, check=True, timeout=60, capture_output=True)
    for i in range(2):
        assert arguments(home / "runs/out", i)[2:4] == [b"--processes=2", b"--process=%d" % i]


# What each process does in its first attempt; the exit status of the job; the longest that it takes, in seconds.
ENDS = {
    "a user's error": ({"_1": ["exit 2 0"]}, 2, 10),
    "one fails, another is told to leave": ({"_0": ["exit 7 0"]}, 7, 10),
    "the first failure counts": ({"_0": ["exit 9 0.9"], "_1": ["exit 8 0.1"]}, 8, 10),
    "a deaf one is killed": ({"_0": ["exit 1 0"], "_1": ["stubborn"]}, 1, 30),
    "a failure after a success": ({"_0": ["exit 0 0"], "_1": ["exit 5 1"]}, 5, 10),
    "one that is done early has others run on": ({"_0": ["exit 0 0"]}, 0, 10),
}


SLOW = ("a deaf one is killed",)


@pytest.mark.parametrize("case", [pytest.param(c, marks=pytest.mark.exhaustive if c in SLOW else ()) for c in ENDS])
def test_one_that_fails_ends_the_others(home, case):
    behaviour, expected, seconds = ENDS[case]
    behave(home / "runs/out", **behaviour)
    begun = time.monotonic()
    status, _, _ = launch(home, *RUN, "--processes=2")
    assert status == expected
    assert time.monotonic() - begun < seconds
    assert not alive(home, 0) and not alive(home, 1)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGABRT])
def test_one_that_is_killed_ends_the_others(home, number):
    behave(home / "runs/out", _0=["long"])
    process = start(home, *RUN, "--processes=2")
    until(functools.partial(began, home, 2))
    os.kill(noted(home / "runs/out", "pid", 1), number)
    process.communicate(timeout=30)
    assert process.returncode == 128 + number
    assert noted(home / "runs/out", "received", 0) == [[signal.SIGTERM]] and not alive(home, 0)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
@pytest.mark.parametrize("whole_group", [False, True], ids=["launcher", "group"])
def test_a_signal_reaches_each_once_and_ends_all_attempts(home, number, whole_group):
    behave(home / "runs/out", _0=["long"], _1=["long"])
    process = start(home, *RUN, "--processes=2", "--attempts=5")
    until(functools.partial(began, home, 2))
    if whole_group:
        os.killpg(process.pid, number)
    else:
        process.send_signal(number)
    process.communicate(timeout=30)
    assert process.returncode == 128 + number
    for i in range(2):
        assert noted(home / "runs/out", "received", i) == [[number]] and noted(home / "runs/out", "tries", i) == 1


def test_what_ends_a_job_leaves_others_of_the_machine_alone(home):
    """X11: two jobs; one loses a process and so ends its other one, and is stopped before it is tried again."""
    behave(home / "runs/other", _0=["long"])
    behave(home / "runs/out", _0=["exit 137 0"], _1=["long"])
    other = start(home, "--config=config.py", "--workdir=runs/other", "--name=other")
    until(lambda: (home / "runs/other/begun-0").exists())
    process = start(home, *RUN, "--processes=2", "--attempts=2")
    until(lambda: (home / "runs/out/received-1").exists())
    assert launch(home, "stop", "--name=j")[0] == 0
    process.communicate(timeout=30)
    assert process.returncode == 143
    other.send_signal(signal.SIGINT)  # which no other job is sent
    other.communicate(timeout=30)
    assert other.returncode == 130
    assert noted(home / "runs/other", "received") == [[signal.SIGINT]] and noted(home / "runs/other", "tries") == 1


def test_a_job_that_is_killed_is_tried_again_and_a_signal_ends_the_pause(home):
    behave(home / "runs/out", _0=["exit 137 0", "long"])
    process = start(home, *RUN, "--attempts=2")
    until(lambda: (home / "runs/out/begun-0").exists() and len(noted(home / "runs/out", "begun")) == 2)
    process.send_signal(signal.SIGTERM)
    err = process.communicate(timeout=30)[1]
    assert process.returncode == 143 and b"attempt 2 of 2 in 10 s" in err
    behave(home / "runs/out", _0=["", "", "exit 137 0"])
    process = start(home, *RUN, "--attempts=2")
    assert process.stderr
    line = b""
    while b"attempt 2 of 2" not in line:
        line = process.stderr.readline()
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=5)
    assert process.returncode == 143 and noted(home / "runs/out", "tries") == 3


def test_status_stop_and_a_second_launch(home):
    assert launch(home, "status", *RUN)[:2] == (0, "j: not running\n")
    behave(home / "runs/out", _0=["long"])
    process = start(home, *RUN)
    until(functools.partial(began, home, 1))
    assert launch(home, "status", "--name=j")[1].startswith(f"j: running, process {process.pid} of ")
    status, _, err = launch(home, *RUN)
    assert (status, err) == (2, f"launch: j: is running already, process {process.pid}\n")
    assert launch(home, "stop", "--name=j")[0] == 0
    assert process.wait(timeout=1) == 143
    process.communicate()
    assert noted(home / "runs/out", "tries") == 1 and launch(home, "status", "--name=j")[1] == "j: not running\n"
    status, _, err = launch(home, "logs", "--name=j")
    assert status == 2 and err.count("\n") == 1


JAX = """
import sys
words = dict(word[2:].split("=", 1) for word in sys.argv[2:])
import jax
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 1)
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(words["coordinator"], int(words["processes"]), int(words["process"]))
from jax.experimental.multihost_utils import process_allgather
import numpy
print("gathered", process_allgather(numpy.array([10 + jax.process_index()])).ravel().tolist(), flush=True)
"""


def test_jax_processes_form_one_job(home):
    (home / "transformer/__main__.py").write_text(JAX)
    status, out, err = launch(home, "--config=config.py", "--processes=2")
    assert status == 0, err
    assert out.splitlines()[-1] == "gathered [10, 11]"


@needs_hosts
@pytest.mark.exhaustive
def test_a_real_training_run_on_two_processes(tmp_path):
    flags = ["--config.train.steps=10", "--config.train.warmup=2", f"--workdir={tmp_path}/run", "--json"]
    words = [word for word in TINY if "every" not in word and "steps" not in word]
    process = start(ROOT, "--processes=2", *words, *flags, "--config.train.eval_every=10", f"--name=test-{os.getpid()}")
    out, err = process.communicate(timeout=240)
    shutil.rmtree(ROOT / "runs/launch" / f"test-{os.getpid()}")
    assert process.returncode == 0, err.decode()
    assert json.loads(out)["step"] == 10
    assert (tmp_path / "run/metrics.jsonl").exists() and b"\n0: step 10/10" in err
