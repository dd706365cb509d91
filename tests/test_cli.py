"""The command line: exit statuses, what goes to which stream, errors in one line."""

import contextlib
import dataclasses
import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import settings as fuzz
from hypothesis import strategies as st

from transformer import cli, stopping
from transformer.__main__ import COMMANDS
from transformer.cli import finite, main, split_overrides
from transformer.errors import UserError, did_you_mean

ROOT = Path(__file__).parents[1]
TINY = f"--config={ROOT / 'experiments' / 'tiny.py'}"
RUN = ["sample", "evaluate", "report"]  # commands that need a run


class Result(NamedTuple):
    status: int
    out: str
    err: str


@pytest.fixture(autouse=True)
def signals() -> Iterator[None]:
    """``main`` sets the process's handlers; pytest wants its own back."""
    before = [(s, signal.getsignal(s)) for s in stopping.SIGNALS]
    yield
    for number, handler in before:
        signal.signal(number, handler)


def run(*argv: str, commands: dict[str, str] = COMMANDS) -> Result:
    """The command line in this process."""
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        status = main(commands, argv)
    return Result(status, out.getvalue(), err.getvalue())


def process(*argv: str, module: str = "transformer", **more: object) -> Result:
    """The command line as a process of its own."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONUNBUFFERED": ""}
    done = subprocess.run(
        [sys.executable, "-m", module, *argv], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120
    )
    return Result(done.returncode, done.stdout, done.stderr)


def refused(*argv: str) -> str:
    """The one line that is printed for wrong input."""
    found = run(*argv)
    assert (found.status, found.out) == (2, ""), found
    assert found.err.startswith("error: ") and len(found.err.splitlines()) == 1, found.err
    assert "Traceback" not in found.err
    return found.err


@pytest.mark.smoke
def test_alone_it_lists_the_commands() -> None:
    """In a real process; ``--help`` and ``help`` say the same."""
    alone = process()
    assert alone.status == 0 and alone.err == ""
    assert all(f"\n  {name} " in alone.out for name in COMMANDS)
    assert run("--help") == run("help") == run("-h") == alone


@pytest.mark.parametrize("name", sorted(COMMANDS))
@pytest.mark.parametrize("word", ["--help", "-h"])
def test_help_of_every_command(name: str, word: str) -> None:
    """Exit status 0, and one runnable example."""
    found = run(name, word)
    assert found.status == 0 and found.err == ""
    lines = found.out.splitlines()
    assert lines[0].startswith(f"python -m transformer {name}: ")
    assert len([line for line in lines if line.startswith(f"  python -m transformer {name} ")]) == 1
    assert "--json" in found.out and "--debug" in found.out


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_the_example_of_every_command_is_one_that_it_understands(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Every flag in it exists; what it would do is not done here."""
    import importlib
    import shlex

    command = importlib.import_module(COMMANDS[name]).COMMAND
    words = shlex.split(command.example)
    assert words[:4] == ["python", "-m", "transformer", name]
    seen: list[cli.Args] = []
    fake = dataclasses.replace(command, run=lambda args: (seen.append(args), ({}, ""))[1])
    monkeypatch.setattr(importlib.import_module(COMMANDS[name]), "COMMAND", fake)
    assert run(*words[3:]).status == 0 and len(seen) == 1


def test_status_2_and_one_line_for_wrong_input_in_a_real_process() -> None:
    found = process("cost", TINY, "--config.model.dpth=3")
    assert found == Result(2, "", "error: config.model.dpth: model has no such setting (did you mean 'depth'?)\n")


def test_a_process_that_was_stopped_does_not_wait_for_a_librarys_threads() -> None:
    """JAX compiles in a pool of threads, which Python joins before it ends."""
    words = "import concurrent.futures as c, sys, time; c.ThreadPoolExecutor().submit(time.sleep, 100); "
    words += "from transformer.stopping import leave_soon; leave_soon(143, 0.2); sys.exit(143)"
    found = subprocess.run([sys.executable, "-c", words], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (found.returncode, found.stdout, found.stderr) == (143, "", "")


def test_a_python_without_the_libraries_is_one_line() -> None:
    words = [
        sys.executable,
        "-I",
        "-S",
        "-c",
        "import runpy, sys; sys.path[:0] = ['.']; runpy.run_module('transformer')",
    ]
    found = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert found.returncode == 2 and found.stdout == "" and len(found.stderr.splitlines()) == 1
    assert " is not installed for " in found.stderr and ".venv/bin/python -m transformer" in found.stderr


def test_blocks_beyond_counting_are_refused() -> None:
    assert "config.model.depth: 1000000000 is too large" in refused("cost", TINY, "--config.model.depth=1000000000")


def test_an_unknown_command_or_flag_is_refused_with_the_nearest() -> None:
    assert refused("trian") == "error: 'trian' is not a command (did you mean 'train'?)\n"
    assert "there are: " in refused("xyzzy")
    assert refused("sample", "--promt=x") == "error: --promt: sample has no such flag (did you mean 'prompt'?)\n"
    assert "config.model.depth" in refused("cost", TINY, "-config.model.depth=3")


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_a_stray_argument_is_refused(name: str) -> None:
    """``depth=3`` without its dashes must not be taken for nothing."""
    argv = ["--run=somewhere"] if name == "report" else []
    assert "'depth=3'" in refused(name, *argv, "depth=3")
    assert "'depth=3'" in refused(name, *argv, "--", "depth=3")


@pytest.mark.parametrize(
    ("argv", "word"),
    [
        (["sample", "--tokens=many"], "tokens"),
        (["sample", "--tokens"], "tokens"),
        (["evaluate", "--stride=1.5"], "stride"),
        (["sample", "--temperature=warm"], "temperature"),
        (["cost", TINY, "--json=perhaps"], "json"),
        (["cost", "--flagfile=/no/such/file"], "flagfile"),
        (["cost"], "--config=FILE.py is missing"),
        (["cost", "--config="], "--config=FILE.py is missing"),
        (["cost", "--config=no/such.py"], "no/such.py"),
        (["train", TINY], "--workdir=DIR is missing"),
        (["train"], "--config=FILE.py is missing"),
        (["cost", TINY, "--config.model.depth"], "--config.model.depth: has no value"),
        (["cost", TINY, "--config.model.depth", "--json"], "--config.model.depth: has no value"),
        (["cost", TINY, "--config.model.depth=1", "--config.model.depth=2"], "is given twice"),
        (["cost", TINY, "--config.model.depth=1", "--config.model.depth.=2"], "config.model.depth."),
        (["cost", TINY, "--config.=2"], "config."),
        (["cost", TINY, "--config.model.heads=5"], "config.model.heads"),
    ],
)
def test_wrong_flags_are_one_line(argv: list[str], word: str) -> None:
    assert word in refused(*argv)


@pytest.mark.parametrize("name", RUN)
def test_a_command_on_a_run_says_when_there_is_none(name: str, tmp_path: Path) -> None:
    assert "--run=DIR is missing" in refused(name)
    assert "is not a run's directory" in refused(name, f"--run={tmp_path}")
    assert "is not a run's directory" in refused(name, f"--run={tmp_path / 'nothing'}")
    assert not (tmp_path / "nothing").exists()
    (tmp_path / "config.json").write_text("{")
    assert "is not JSON" in refused(name, f"--run={tmp_path}")
    (tmp_path / "config.json").write_text('{"modell": {}}')
    assert "did you mean 'model'?" in refused(name, f"--run={tmp_path}")
    (tmp_path / "config.json").write_bytes(b"\xff\xfe\x00")
    assert "is not JSON" in refused(name, f"--run={tmp_path}")


@pytest.mark.parametrize("name", RUN)
def test_a_run_takes_no_settings(name: str, tmp_path: Path) -> None:
    assert "takes no settings" in refused(name, f"--run={tmp_path}", "--config.model.depth=3")


@pytest.mark.parametrize(
    ("flag", "word"),
    [
        ("--temperature=-1", "temperature"),
        ("--temperature=nan", "temperature"),
        ("--top_p=-0.1", "top_p"),
        ("--top_p=1.1", "top_p"),
        ("--top_p=nan", "top_p"),
        ("--top_k=-1", "top_k"),
        ("--min_p=2", "min_p"),
        ("--repetition_penalty=0", "repetition_penalty"),
    ],
)
def test_sampling_out_of_range_is_refused(flag: str, word: str) -> None:
    """G14, G15: before the run is even opened."""
    assert f"--{word}: " in refused("sample", "--run=nowhere", flag)


def test_the_report_takes_its_directory_without_a_flag_but_only_one() -> None:
    assert "nowhere: is not a run's directory" in refused("report", "nowhere")
    assert "'there'" in refused("report", "nowhere", "there")
    assert "'there'" in refused("report", "--run=nowhere", "there")


def test_what_stands_after_the_action_goes_to_the_repeated_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformer.commands import runs

    seen: list[cli.Args] = []
    act = dataclasses.replace(runs.COMMAND, run=lambda args: (seen.append(args), ({}, ""))[1])
    monkeypatch.setattr(runs, "COMMAND", act)
    for words in (
        ["diff", "a", "b"],
        ["--run=a", "diff", "b"],
        ["diff", "--run=a", "--run=b"],
        ["--action=diff", "a", "b"],
    ):
        assert run("runs", *words).status == 0
        assert (seen[-1].flags.action, seen[-1].flags.run) == ("diff", ["a", "b"])
    assert run("runs", "list").status == 0 and seen[-1].flags.run is None


def test_json_of_the_cost_is_one_object_and_the_settings_change_it() -> None:
    found = run("cost", TINY, "--json", "--config.model.depth=3")
    assert found.status == 0 and found.err == "" and found.out.count("\n") == 1
    bill = json.loads(found.out)
    assert bill["parameters"]["blocks"] == 3 * bill["parameters"]["block"]
    spaced = run("cost", TINY, "--config.model.depth", "3")
    assert spaced.status == 0 and "3 blocks" in spaced.out and not spaced.out.startswith("{")


def fake(monkeypatch: pytest.MonkeyPatch, act: Callable[[cli.Args], object]) -> dict[str, str]:
    """A table with one command, ``act``."""
    import types

    module = types.ModuleType("fake_command")
    module.COMMAND = cli.Command("s", "python -m transformer act", lambda values: None, act)  # type: ignore[attr-defined, arg-type]
    monkeypatch.setitem(sys.modules, "fake_command", module)
    return {"act": "fake_command"}


def test_what_is_not_the_users_fault_is_status_1_and_debug_shows_where(monkeypatch: pytest.MonkeyPatch) -> None:
    def act(args: cli.Args) -> object:
        raise RuntimeError("first\nsecond")

    commands = fake(monkeypatch, act)
    found = run("act", commands=commands)
    assert found == Result(1, "", "failed: RuntimeError: first (--debug shows where)\n")
    with pytest.raises(RuntimeError):
        run("act", "--debug", commands=commands)


@pytest.mark.parametrize("flag", ["--debug", "--debug=true"])
def test_debug_shows_the_traceback_of_wrong_input_too(flag: str) -> None:
    found = run("cost", TINY, "--config.model.depth=x", flag)
    assert found.status == 2 and "Traceback" in found.err
    assert found.err.splitlines()[-1] == "error: config.model.depth: 'x' is not a whole number"


def test_json_has_no_infinities_and_no_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that diverged has a perplexity beyond any number; JSON has no word for that."""
    commands = fake(monkeypatch, lambda args: ({"a": float("inf"), "b": [float("nan"), 1.5, {"c": "x"}]}, ""))
    found = run("act", "--json", commands=commands)
    assert found.out == '{"a": null, "b": [null, 1.5, {"c": "x"}]}\n'
    assert finite((1, True, None, "inf")) == [1, True, None, "inf"]


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_outside_training_stops_at_once(
    number: signal.Signals, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands = fake(monkeypatch, lambda args: os.kill(os.getpid(), number))
    assert run("act", commands=commands).status == status


def test_in_a_deferred_part_the_first_signal_is_noted_and_the_second_stops() -> None:
    stopping.install()
    with stopping.deferred() as asked:
        assert asked.signal is None
        asked.unsaved.add("run")
        os.kill(os.getpid(), signal.SIGTERM)
        assert asked.signal == signal.SIGTERM
        with pytest.raises(stopping.Stop) as stop:
            os.kill(os.getpid(), signal.SIGINT)
        assert stop.value.status == 130
    with stopping.deferred(), pytest.raises(stopping.Stop) as stop:
        os.kill(os.getpid(), signal.SIGTERM)  # nothing is unsaved
    with pytest.raises(stopping.Stop) as stop:
        os.kill(os.getpid(), signal.SIGTERM)
    assert stop.value.status == 143


def test_signals_that_were_handled_end_nothing_later() -> None:
    """Several within a moment, each seen by the handler: the thread that watches must not see one left over."""
    script = """if True:
        import os, signal, time
        from transformer import stopping
        stopping.GRACE = 0.5
        stopping.install()
        for _ in range(4):
            try:
                os.kill(os.getpid(), signal.SIGTERM)
            except stopping.Stop:
                print("seen")
        time.sleep(4 * stopping.GRACE)
    """
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "seen\n" * 4, "")


@pytest.mark.parametrize("argv", [["--help"], ["cost", "--help"], ["cost", TINY, "--json"]], ids=" ".join)
def test_a_reader_that_leaves_is_met_with_silence(argv: list[str]) -> None:
    """``python -m transformer ... | head`` prints no traceback, buffered or not."""
    read, write = os.pipe()
    os.close(read)
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONUNBUFFERED": ""}
    command = [sys.executable, "-m", "transformer", *argv]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, stdout=write, stderr=subprocess.PIPE, text=True, timeout=120
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (1, "")


words = st.text(max_size=6) | st.sampled_from(
    ["--config.", "--config.a=1", "--config.a", "--config.a.b=", "--config.a==", "--json", "x", "--", "--config", "\n"]
)


@fuzz(deadline=None)
@given(st.lists(words, max_size=6))
def test_taking_out_dotted_settings_never_raises_anything_but_a_user_error(argv: list[str]) -> None:
    try:
        changes, rest = split_overrides(argv)
    except UserError as error:
        assert len(str(error).splitlines()) == 1
    else:
        assert not any(word.startswith("--config.") for word in rest)
        assert len(rest) + len(changes) <= len(argv)


def test_dotted_settings_are_taken_out_in_both_forms() -> None:
    argv = ["--json", "--config.a.b=1=2", "--config.c", "-3", "x", "--config.d="]
    assert split_overrides(argv) == ({"a.b": "1=2", "c": "-3", "d": ""}, ["--json", "x"])


def test_the_nearest_name() -> None:
    assert did_you_mean("dpth", ["depth", "width"]) == " (did you mean 'depth'?)"
    assert did_you_mean("zzz", ["b", "a"]) == " (there are: a, b)" and did_you_mean("zzz", []) == ""
