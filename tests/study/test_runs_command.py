"""``runs list``, ``show`` and ``diff``: what is printed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.runs.whole import done, refused, run
from tests.study.written import BASE, COMMITS, change, json_leaves, listed, write_run
from transformer import checkout
from transformer.config import Experiment
from transformer.settings import override

ROOT = Path(__file__).parents[2]


def test_a_run_in_one_line(tmp_path: Path) -> None:
    write_run(tmp_path / "deep", model__depth=3, bits=(2.125, 2.5))
    write_run(tmp_path / "plain", step=12, model__positions="rotary", model__mlp="swiglu")
    head, deep, plain = run("runs", "list", f"--root={tmp_path}").out.splitlines()
    assert head.split()[:2] == ["run", "step"]
    assert head.index("state") == deep.index("done") == plain.index("stopped"), "columns stand under one another"
    date = ["2026-11-29", "18:55"]
    name = str(tmp_path / "deep")
    changed = ["depth=3", "positions=learned", "mlp=gelu"]
    assert deep.split() == [name, "20/20", "2.5000", "2.1250", "2,000", "40", "done", *date, *changed]
    stopped = ["stopped", "at", "step", "12"]
    name = str(tmp_path / "plain")
    changed = ["depth=4", "positions=rotary", "mlp=swiglu"]
    assert plain.split() == [name, "12/20", "2.5000", "2.5000", "1,200", "24", *stopped, *date, *changed]
    first = listed(tmp_path)[0]
    assert first["differs"] == {"depth": 3, "positions": "learned", "mlp": "gelu"}
    assert first["settings"] == json_leaves(override(Experiment(), {"model.depth": 3, **BASE}))
    many = {f"train__{name}": 7 for name in ("seed", "warmup", "log_every", "keep", "max_skipped", "eval_windows")}
    write_run(tmp_path / "many", **many, data__source="x" * 99, data__seed=3, train__clip=None, model__dropout=0.5)
    assert run("runs", "list", f"--root={tmp_path}").out.count("and 3 more") == 3
    assert f"source={'x' * 23}… " in run("runs", "list", f"--root={tmp_path}").out


def test_settings_whose_last_names_are_alike_keep_more_of_them(tmp_path: Path) -> None:
    write_run(tmp_path / "a", model__width=192)
    write_run(tmp_path / "b", model__width=48, model__mlp__width=64)
    assert listed(tmp_path)[1]["differs"] == {"model.width": 48, "mlp.width": 64}
    for name, kind in (("c", "x"), ("d", "y")):  # no ending of model.mlp tells it from model.mlp.kind
        folder = write_run(tmp_path / name, model__mlp="swiglu")
        stored = json.loads((folder / "config.json").read_text())
        change(folder / "config.json", model=stored["model"] | {"mlp": kind})
    write_run(tmp_path / "e", model__mlp="swiglu")
    found = {Path(e["run"]).name: e["differs"] for e in listed(tmp_path)}
    assert found["d"] == {"model.width": 192, "model.mlp": "y"}
    assert found["e"]["model.mlp.kind"] == "swiglu"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["list", "--where=model.dpth=3"], "--where: 'model.dpth' is no setting of these runs and no result"),
        (["list", "--where=model.dpth=3"], "(did you mean 'model.depth'?)"),
        (["list", "--sort=bit_per_byte"], "(did you mean 'bits_per_byte'?)"),
        (["list", "--where=model.depth.kind=3"], "'model.depth.kind' is no setting"),
        (["list", "--where=model.depth=four"], "--where: model.depth: 'four' is not a number"),
        (["list", "--where=model.bias=perhaps"], "--where: model.bias: 'perhaps' is not true or false"),
        (["list", "--where=step=done"], "--where: step: 'done' is not a number"),
        (["list", "--where=model.depth"], "'model.depth' is not NAME=VALUE"),
        (["list", "--where==3"], "'=3' is not NAME=VALUE"),
        (["list", "--root=no/where"], "--root: there is no directory no/where"),
        (["list", "--root=gs://bucket/runs"], "--root: gs://bucket/runs is a URL"),
        (["list", "a"], "runs list: takes no directory (where to look is --root), and was given a"),
        (["list", "--run=a"], "runs list: takes no directory"),
        (["list", "--step=3"], "--step: runs list has no use for it"),
        (["show"], "runs show: takes one run's directory, and was given none"),
        (["show", "a", "b", "c"], "runs show: takes one run's directory, and was given a, b, c"),
        (["show", "a", "b"], "runs show: takes one run's directory, and was given a, b"),
        (["show", "nothing"], "nothing: is not a run's directory (it has no config.json)"),
        (["show", "a", "--where=step=3"], "--where: runs show has no use for it"),
        (["diff", "a"], "runs diff: takes two runs' directories, and was given a"),
        (["diff", "--run=a", "b", "c"], "runs diff: takes two runs' directories, and was given a, b, c"),
        (["diff", "a", "nothing"], "nothing: is not a run's directory"),
        (["diff", "a", "broken"], "broken: config.json: is not JSON"),
        (["diff", "a", "b", "--sort=step"], "--sort: runs diff has no use for it"),
        (["reproduce", "--step=1"], "runs reproduce: takes one run's directory, and was given none"),
        (["reproduce", "a"], "--step=N is missing"),
        (["shw", "a"], "runs: 'shw' is no action (did you mean 'show'?)"),
        ([], "runs: 'nothing' is no action (there are: diff, list, reproduce, show)"),
    ],
)
def test_wrong_input_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], said: str) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b", "broken"):
        write_run(Path(name))
    Path("broken/config.json").write_text("{")
    found = ["--root=."] if words[:1] == ["list"] and not any(w.startswith("--root") for w in words) else []
    assert said in refused("runs", *words, *found)


@pytest.mark.parametrize("evaluation", ["evaluation.json", "result.json"])
def test_all_of_a_run_is_shown(tmp_path: Path, evaluation: str) -> None:
    """Of one by itself, and of one of a study's."""
    folder = write_run(tmp_path / "a", model__depth=3, bits=(2.0, 2.5))
    starts = [
        {"start": "2026-11-28T10:00:00+00:00", "resumed_at_step": 0, "host": "there", "commit": COMMITS[1]},
        {"start": "2026-11-28T11:00:00+00:00", "resumed_at_step": 6, "host": "there", "commit": COMMITS[1]},
    ]
    change(folder / "provenance.json", earlier=starts, resumed_at_step=9)
    (folder / evaluation).write_text('{"bits_per_byte": 2.375, "loss": 1.5}')
    for name in ("10", "5.orbax-checkpoint-tmp", "9"):
        (folder / "checkpoints" / name).mkdir()
    (folder / "checkpoints" / "10" / "digests.json").write_text("{}")
    result = done("runs", "show", str(folder))
    assert result["settings"] == json_leaves(override(Experiment(), {"model.depth": 3, **BASE}))
    origin = json.loads((folder / "provenance.json").read_text())
    assert result["provenance"] == origin
    assert result["results"] == {
        "state": "done",
        "step": 20,
        "tokens": 2000,
        "loss": 2.0,
        "eval_loss": 5.0,
        "bits_per_byte": 2.5,
        "best_bits_per_byte": 2.0,
        "evaluation.loss": 1.5,
        "evaluation.bits_per_byte": 2.375,
        **dict.fromkeys(("error", "best_error", "evaluation.error")),  # those of synthetic tasks
        "seconds": 40.0,
        "start": "2026-11-28T10:00:00+00:00",
    }
    size = {p.name: p.stat().st_size for p in folder.iterdir() if p.is_file()}
    assert result["files"] == size | {"checkpoints/": 1004}
    notes = {c["name"]: (c["note"], c["bytes"]) for c in result["checkpoints"]}
    assert notes == {
        "5.orbax-checkpoint-tmp": ("not a finished checkpoint", notes["5.orbax-checkpoint-tmp"][1]),
        "9": ("not a finished checkpoint", notes["9"][1]),
        "10": ("best", 2),
        "20": ("newest", 1002),
    }
    text = run("runs", "show", f"--run={folder}").out
    assert text.splitlines()[0] == f"{folder}: done"
    rows = [" ".join(line.split()) for line in text.splitlines()]
    for row in (
        "model.depth 3",
        "model.positions.kind learned",
        "train.init_from -",
        "train.prompts ''",
        "command python -m transformer train '--config=my file.py'",
        f"commit {COMMITS[0]}",
        "uncommitted 3 lines of changes (--json shows them)",
        "versions jax 0.10.2, flax 0.12.8",
        "devices 1 x cpu (cpu)",
        "content_hash c0ffee",
        f"started 2026-11-28T10:00:00+00:00, after step 0, on there, commit {COMMITS[1]}",
        f"resumed 2026-11-28T11:00:00+00:00, after step 6, on there, commit {COMMITS[1]}",
        f"resumed {origin['start']}, after step 9, until {origin['end']}, on here, commit {COMMITS[0]}",
        "evaluation.bits_per_byte 2.375",
        "20 1002 B newest",
        "checkpoints/ 1004 B",
    ):
        assert row in rows, row
    assert "\n\ncheckpoints\n  none\n" in run("runs", "show", str(write_run(tmp_path / "new", step=0))).out


def test_what_differs_between_two_runs(tmp_path: Path) -> None:
    a = write_run(tmp_path / "a", model__positions="rotary")
    b = write_run(tmp_path / "b", step=12, model__depth=3)
    change(b / "provenance.json", versions={"jax": "0.12.0", "flax": "0.12.8"}, content_hash="5eed", cores=2)
    change(b / "provenance.json", uncommitted="diff\n-old\n+newer")
    result = done("runs", "diff", str(a), str(b))
    assert result["runs"] == [str(a), str(b)] and result["same"] is False
    assert result["settings"] == {
        "model.depth": [4, 3],
        "model.positions.base": [10000.0, "absent"],
        "model.positions.kind": ["rotary", "learned"],
        "model.positions.scaling.kind": ["unscaled", "absent"],
        "model.positions.share": [1.0, "absent"],
    }
    assert result["data"] == {"content_hash": ["c0ffee", "5eed"]}
    assert result["machine"] == {"versions.jax": ["0.10.2", "0.12.0"], "cores": ["absent", 2]}
    assert result["results"]["tokens"] == [2000, 1200] and result["results"]["bits_per_byte"] == [2.25, 2.5]
    code = result["code"]
    assert code["differs"] and code["commits"] == [[COMMITS[0]]] * 2 and code["uncommitted_lines"] == [3, 3]
    assert code["uncommitted"][-2:] == ["-+new", "++newer"] and " -old" in code["uncommitted"]
    text = run("runs", "diff", f"--run={a}", f"--run={b}").out
    rows = [" ".join(line.split()) for line in text.splitlines()]
    for row in (
        "model.positions.kind rotary learned",
        "content_hash c0ffee 5eed",
        "versions.jax 0.10.2 0.12.0",
        "-+new",
        "++newer",
        "tokens 2000 1200",
        "bits_per_byte 2.25 2.5",
    ):
        assert row in rows, row
    assert "nothing differs" not in text and "python" not in text and "tokenizer_hash" not in text
    change(b / "provenance.json", uncommitted="\n".join(map(str, range(100))))
    text = run("runs", "diff", str(a), str(b)).out
    assert "and 46 more lines, which --json shows" in text and "    +53" in text and "    +54" not in text


def test_two_equal_runs_are_said_to_be_equal_as_far_as_that_is_known(tmp_path: Path) -> None:
    a, b = write_run(tmp_path / "a"), write_run(tmp_path / "b")
    same = "nothing differs: the same settings, code, data and machine"
    assert same in run("runs", "diff", str(a), str(b)).out and done("runs", "diff", str(a), str(b))["same"]
    for folder in (a, b):
        change(folder / "provenance.json", commit=None)
    unknown = run("runs", "diff", str(a), str(b)).out
    assert same not in unknown and "nothing differs of what was recorded; the code's commit was not" in unknown
    for name, value in (("tokenizer_hash", "other"), ("devices", ["1 x gpu (gpu)"])):
        before = json.loads((b / "provenance.json").read_text())
        change(b / "provenance.json", **{name: value})
        assert not done("runs", "diff", str(a), str(b))["same"]
        (b / "provenance.json").write_text(json.dumps(before))
    change(b / "provenance.json", commit=COMMITS[0])
    assert "different code" in run("runs", "diff", str(a), str(b)).out


def test_code_counts_all_starts_of_a_run(tmp_path: Path) -> None:
    """A run that was resumed with other code is not the same as one that never was."""
    a, b = write_run(tmp_path / "a"), write_run(tmp_path / "b")
    change(b / "provenance.json", earlier=[{"commit": COMMITS[1]}])
    result = done("runs", "diff", str(a), str(b))
    assert result["code"]["commits"] == [[COMMITS[0]], [COMMITS[1], COMMITS[0]]] and not result["same"]


def test_with_a_checkout_at_hand_the_files_that_changed_between_two_commits_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a damaged provenance.json calls a commit is never taken for an option of git's."""
    repository = tmp_path / "repository"
    repository.mkdir()

    def git(*words: str) -> str:
        named = ["git", "-c", "user.name=n", "-c", "user.email=e", *words]
        return subprocess.run(named, cwd=repository, capture_output=True, text=True, check=True).stdout.strip()

    git("init", "-q")
    commits = []
    for content in ("one\n", "one\ntwo\n"):
        (repository / "file.txt").write_text(content)
        git("add", "file.txt")
        git("commit", "-q", "-m", "m")
        commits.append(git("rev-parse", "HEAD"))
    monkeypatch.setattr(checkout, "__file__", str(repository / "checkout.py"))
    a, b = write_run(tmp_path / "a"), write_run(tmp_path / "b")
    change(a / "provenance.json", commit=commits[0])
    change(b / "provenance.json", commit=commits[1])
    text = run("runs", "diff", str(a), str(b)).out
    assert "file.txt | 1 +" in text and commits[0] in text and commits[1] in text
    change(b / "provenance.json", commit=f"--output={tmp_path / 'written'}")
    assert done("runs", "diff", str(a), str(b))["code"]["stat"] is None
    assert not (tmp_path / "written").exists()


@pytest.mark.parametrize("words", [["list", "--root=."], ["show", "a"], ["diff", "a", "b"]])
def test_looking_at_runs_needs_neither_jax_nor_what_is_slow_to_start(tmp_path: Path, words: list[str]) -> None:
    for name in ("a", "b"):
        write_run(tmp_path / name)
    code = (
        "import sys; from transformer.__main__ import COMMANDS; from transformer.cli import main\n"
        f"assert main(COMMANDS, {['runs', *words]!r}) == 0\n"
        "print(sorted({'jax', 'flax', 'orbax', 'optax', 'numpy', 'tensorboardX', 'sentencepiece'} & set(sys.modules)))"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "[]", done.stdout


def test_what_is_no_printable_character_stays_within_its_line(tmp_path: Path) -> None:
    """A newline in a directory's name, a terminal's escape in a setting, bytes that are no text."""
    write_run(tmp_path / "a\nb", data__source="x\x1b[31m\ny")
    write_run(tmp_path / os.fsdecode(b"c\xff"))
    for number, folder in enumerate(tmp_path.iterdir()):
        change(folder / "config.json", **{"name\x1b\n": number})
    found = run("runs", "list", f"--root={tmp_path}").out
    assert (
        len(found.splitlines()) == 3
        and "a\\nb" in found
        and "name\\x1b\\n=1" in found
        and "source=x\\x1b[31m\\ny" in found
    )
    assert "\x1b" not in found and found.encode()
    assert "\x1b" not in run("runs", "show", str(tmp_path / "a\nb")).out
