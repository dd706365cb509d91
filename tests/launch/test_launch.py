"""python -m launch: the command it starts, seen from outside.

A package named `transformer` in the working directory stands in for the library: it writes down its argument
list and then does what the test asks of it.
"""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launch.__main__ import main
from tests.launch.checkout import DEFAULT_SIGNALS

ROOT = Path(__file__).resolve().parents[2]
STAND_IN = """
import json, os, signal, sys, time
with open("argv.json", "w") as f:
    json.dump([os.fsencode(a).hex() for a in sys.argv[1:]], f)
behaviour = os.environ["STAND_IN"]
if behaviour.startswith("exit "):
    sys.exit(int(behaviour.split()[1]))
if behaviour.startswith("die "):
    os.kill(os.getpid(), int(behaviour.split()[1]))
received = []
def note(number, frame):
    received.append(number)
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, note)
open("waiting", "w").close()
deadline = time.monotonic() + 60
while not received and time.monotonic() < deadline:
    time.sleep(0.01)
time.sleep(0.3)  # a second copy of the signal would arrive by now
with open("received.json", "w") as f:
    json.dump(received, f)
sys.exit(128 + received[0] if received else 99)
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "transformer").mkdir()
    (tmp_path / "transformer" / "__init__.py").touch()
    (tmp_path / "transformer" / "__main__.py").write_text(STAND_IN)
    return tmp_path


def start(place: Path, *arguments: str | bytes, behaviour: str = "exit 0") -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [*DEFAULT_SIGNALS, sys.executable, "-m", "launch", *arguments],
        cwd=place,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "STAND_IN": behaviour,
            "PYTHONIOENCODING": "utf-8:strict",
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,  # so that a test can play the terminal, which signals a whole group
    )


def launch(place: Path, *arguments: str | bytes, behaviour: str = "exit 0") -> tuple[int, bytes, bytes]:
    process = start(place, *arguments, behaviour=behaviour)
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err


def received_arguments(place: Path) -> list[bytes]:
    return [bytes.fromhex(argument) for argument in json.loads((place / "argv.json").read_text())]


AWKWARD: list[str | bytes] = [
    "--a=a;b",
    "x,y",
    "it's",
    "$HOME",
    "a b",
    "line\nbreak",
    "",
    "*",
    "~",
    'say "hi"',
    "\\",
    "é",
    b"\xff",
]


@pytest.mark.smoke
def test_arguments_arrive_unchanged(place: Path) -> None:
    status, _, err = launch(place, "local", *AWKWARD)
    assert (status, err) == (0, b"")
    assert received_arguments(place) == [b"train", *map(os.fsencode, AWKWARD)]


@pytest.mark.parametrize("value", AWKWARD, ids=repr)
def test_dry_run_prints_what_a_shell_reads_back(place: Path, value: str | bytes) -> None:
    status, out, err = launch(place, "local", "--config=c.py", value, "--dry_run")
    assert (status, err) == (0, b"")
    assert not (place / "argv.json").exists(), "a dry run started the command"
    env = {**os.environ, "STAND_IN": "exit 0"}
    subprocess.run([b"sh", b"-c", out], cwd=place, env=env, check=True, timeout=60)
    assert received_arguments(place) == [b"train", b"--config=c.py", os.fsencode(value)]


def test_dry_run_as_json(place: Path) -> None:
    status, out, _ = launch(place, "local", "--config=c.py", "--json", "--dry_run")
    assert status == 0
    command = [sys.executable, "-m", "transformer", "train", "--config=c.py", "--json"]
    assert json.loads(out) == {"where": "local", "command": command}


@pytest.mark.parametrize("status", [0, 1, 2, 130, 143])
def test_exit_status_is_passed_on(place: Path, status: int) -> None:
    assert launch(place, "local", behaviour=f"exit {status}")[0] == status


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_death_by_signal_is_128_plus_its_number(place: Path, number: signal.Signals) -> None:
    assert launch(place, "local", behaviour=f"die {number.value}")[0] == 128 + number


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline, f"{path.name} never came"
        time.sleep(0.01)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
@pytest.mark.parametrize("whole_group", [False, True], ids=["launcher", "group"])
def test_signal_reaches_the_run_once(place: Path, number: signal.Signals, whole_group: bool) -> None:
    process = start(place, "local", behaviour="wait")
    wait_for(place / "waiting")
    if whole_group:  # as the terminal does on Ctrl-C
        os.killpg(process.pid, number)
    else:
        process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (128 + number, b"")
    assert json.loads((place / "received.json").read_text()) == [number]


def test_unknown_place_is_one_line_and_status_2(place: Path) -> None:
    status, out, err = launch(place, "moon", "--config=c.py")
    assert (status, out) == (2, b"")
    assert err.count(b"\n") == 1
    assert b"'moon'" in err and b"local" in err
    assert not (place / "argv.json").exists()


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"], ["local", "--help"]], ids=shlex.join)
def test_usage(place: Path, arguments: list[str]) -> None:
    status, out, err = launch(place, *arguments)
    assert (status, err) == (0, b"")
    assert not (place / "argv.json").exists()
    (example,) = [line.split(b":", 1)[1] for line in out.splitlines() if line.startswith(b"example:")]
    words = shlex.split(example.decode())
    assert words[:3] == ["python", "-m", "launch"]
    assert launch(place, *words[3:])[0] == 0


@pytest.mark.parametrize("page", ["README.md", "docs/launch.md"])
def test_command_lines_in_the_documentation_are_valid(
    page: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the places whose dry run needs nothing but the checkout."""
    text = (ROOT / page).read_text().replace("\\\n", " ")
    monkeypatch.chdir(ROOT)
    for line in re.findall(r"^ {4}python -m launch ((?:local|slurm) .*)$", text, re.M):
        assert main([*shlex.split(line), "--dry_run"]) == 0, line
        assert "--config=experiments/" in capsys.readouterr().out
