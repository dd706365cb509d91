"""The runs on disk: found, and read whole or damaged."""

import contextlib
import fcntl
import json
import os
import random
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as fuzz
from hypothesis import strategies as st

from tests.runs.whole import done, run
from tests.study.written import COMMITS, STEPS, change, listed, names, provenance, write_run
from transformer.errors import UserError
from transformer.files import alone, in_use
from transformer.study import comparison, listing, registry
from transformer.study.selection import in_order


def test_every_run_is_found_once_at_any_depth(tmp_path: Path) -> None:
    """Through links, and through loops of them; neither inside checkpoints nor where another program's file lies."""
    elsewhere = write_run(tmp_path / "elsewhere" / "far")
    root = tmp_path / "runs"
    for name in ("b", "study/arms/deep/seed_0", "study/arms/deep/seed_1", "a", "a/again"):
        write_run(root / name)
    (root / "z").symlink_to(elsewhere)
    (root / "study" / "loop").symlink_to(root)
    (root / "also_b").symlink_to(root / "b")
    write_run(root / "a" / "checkpoints" / "inner")
    write_run(root / ".hidden" / "run")
    (root / "weights").mkdir()
    (root / "weights" / "config.json").write_text('{"model_type": "gpt2", "n_layer": 12}')
    expected = ["a", "a/again", "b", "study/arms/deep/seed_0", "study/arms/deep/seed_1", "z"]
    assert names(root) == expected
    assert names(root / "b") == ["."], "the root may be a run"
    assert done("runs", "list", f"--root={root / 'weights'}") == {
        "root": str(root / "weights"),
        "known": 0,
        "runs": [],
    }
    assert run("runs", "list", f"--root={root / 'weights'}").out == f"no runs in {root / 'weights'}\n"


def test_the_states_of_a_run(tmp_path: Path) -> None:
    write_run(tmp_path / "done")
    for name in ("cleared", "no_end", "unsaved"):
        write_run(tmp_path / name)
    (tmp_path / "cleared" / "checkpoints" / "20" / "digests.json").unlink()  # "end" says it all the same
    change(tmp_path / "no_end" / "provenance.json")
    for name in ("no_end", "unsaved"):  # killed after the last step; "unsaved" before its checkpoint was whole
        origin = {k: v for k, v in provenance(STEPS).items() if k != "end"}
        (tmp_path / name / "provenance.json").write_text(json.dumps(origin))
    (tmp_path / "unsaved" / "checkpoints" / "20" / "digests.json").unlink()
    write_run(tmp_path / "killed", step=7)
    (write_run(tmp_path / "between", step=7) / "checkpoints" / "7").rename(tmp_path / "between" / "checkpoints" / "8")
    write_run(tmp_path / "new", step=0)
    (write_run(tmp_path / "newer", step=0) / "provenance.json").unlink()
    write_run(tmp_path / "now", step=9)
    with alone(tmp_path / "now"), alone(tmp_path / "done"):
        found = {Path(entry["run"]).name: (entry["state"], entry["step"]) for entry in listed(tmp_path)}
    assert found == {
        "done": ("done", 20),
        "cleared": ("done", 20),
        "no_end": ("done", 20),
        "unsaved": ("stopped", 20),
        "killed": ("stopped", 7),
        "between": ("stopped", 8),  # stopped where nothing is logged
        "new": ("never trained", 0),
        "newer": ("never trained", 0),
        "now": ("training", 9),
    }
    assert dict(zip(names(tmp_path), [e["state"] for e in listed(tmp_path)], strict=True))["now"] == "stopped"


def test_a_look_at_a_run_does_not_keep_it_from_being_trained(tmp_path: Path) -> None:
    """Looking takes the lock for a moment; training waits for that long, and no longer for another training."""

    looked, begin = threading.Event(), time.monotonic()

    def look() -> None:
        handle = os.open(tmp_path, os.O_RDONLY)
        fcntl.flock(handle, fcntl.LOCK_SH)
        looked.set()
        time.sleep(0.05)
        os.close(handle)

    thread = threading.Thread(target=look)
    thread.start()
    looked.wait()
    with alone(tmp_path):
        assert time.monotonic() - begin >= 0.05 and in_use(tmp_path)
        with pytest.raises(Exception, match="another process trains"), alone(tmp_path):
            pass
    thread.join()
    assert not in_use(tmp_path)
    with alone(tmp_path):  # nothing of the look is left
        pass


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("config.json", b"{", "config.json: is not JSON"),
        ("config.json", b"[]", "config.json: is not a JSON object"),
        ("config.json", b"\xff", "config.json: is not JSON"),
        ("config.json", b'{"train": {"seed": 3}}', "config.json: has no number of steps in train.steps"),
        ("config.json", b'{"train": {"steps": "3"}}', "config.json: has no number of steps in train.steps"),
        ("config.json", b'{"train": {"steps": 20, "prompts": [[]]}}', "config.json: train.prompts is not a plain"),
        ("config.json", b'{"train": {"steps": 19}, "tokenizer": {"kind": "bytes"}}', "metrics.jsonl: has step 20"),
        ("config.json", b'{"train": {"steps": 20}, "tokenizer": {"kind": "bpe"}}', "tokenizer.model: is missing"),
        ("config.json", None, "config.json"),
        ("provenance.json", b"3", "provenance.json: is not a JSON object"),
        ("provenance.json", b"", "provenance.json: is not JSON"),
        ("metrics.jsonl", b'{"step": 1}\n{"step": 2\n{"step": 3}\n', "metrics.jsonl: line 2 is not a record"),
        ("metrics.jsonl", b"3\n", "metrics.jsonl: line 1 is not a record"),
        ("metrics.jsonl", b'{"loss": 2}\n', "metrics.jsonl: line 1 is not a record"),
        ("metrics.jsonl", b'{"step": "2"}\n', "metrics.jsonl: line 1 is not a record"),
        ("metrics.jsonl", None, "metrics.jsonl: cannot be read"),
        ("metrics.jsonl", b"[" * 200_000 + b"\n", "metrics.jsonl: line 1 is not a record"),
        ("timing.jsonl", b"\x00\x00\n", "timing.jsonl: line 1 is not a record"),
        ("evaluation.json", b"null", "evaluation.json: is not a JSON object"),
        ("provenance.json", b'{"a":' + b"[" * 200_000, "provenance.json: is not JSON"),
        ("config.json", b'{"a":' * 5000 + b"1" + b"}" * 5000, "config.json: is"),
    ],
)
def test_what_is_damaged_is_said_and_the_rest_is_read(
    tmp_path: Path, name: str, content: bytes | None, words: str
) -> None:
    """None stands for a directory in the file's place."""
    write_run(tmp_path / "a")
    write_run(tmp_path / "whole", model__depth=2)
    if content is None:
        (tmp_path / "a" / name).unlink()
        (tmp_path / "a" / name).mkdir()
    else:
        (tmp_path / "a" / name).write_bytes(content)
    damaged, whole = listed(tmp_path)
    assert damaged["state"] == "damaged" and len(damaged["damage"]) == 1 and words in damaged["damage"][0]
    assert whole["state"] == "done" and whole["damage"] == []
    if name != "metrics.jsonl":
        assert damaged["bits_per_byte"] == 2.25
    text = run("runs", "list", f"--root={tmp_path}").out.splitlines()
    assert len(text) == 3 and words in text[1]
    assert words in run("runs", "show", str(tmp_path / "a")).out


def test_the_last_record_that_a_kill_cut_off_is_no_damage(tmp_path: Path) -> None:
    with (write_run(tmp_path / "a", step=7) / "metrics.jsonl").open("a") as file:
        file.write('{"step": 8, "lo')
    assert [(e["state"], e["step"]) for e in listed(tmp_path)] == [("stopped", 7)]


scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.just(10**400)
anything = st.recursive(
    scalars, lambda x: st.lists(x, max_size=2) | st.dictionaries(st.text(max_size=2), x, max_size=2)
)
FILES = ("config.json", "provenance.json", "metrics.jsonl", "timing.jsonl", "evaluation.json")
FILES += ("checkpoints/20/digests.json", "checkpoints")


def places(data: Any) -> list[tuple[Any, Any]]:
    """Every container in JSON, with a key of it."""
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    return [found for key, value in items for found in [(data, key), *places(value)]]


NASTY = (None, True, -1, 10**400, 1e308, "", "x\x1b\n\ud800", [], [3], [[]], {}, {"kind": "x"}, {"start": 3})


def changed(data: Any) -> Iterator[Any]:
    """``data`` with each value of it in turn replaced by each of NASTY, and each name by one that is none."""
    for container, key in places(data):
        value = container[key]
        for nasty in NASTY:
            container[key] = nasty
            yield data
        container[key] = value
        if isinstance(container, dict):
            container["x\x1b\n\ud800"] = container.pop(key)
            yield data
            container[key] = container.pop("x\x1b\n\ud800")


@pytest.mark.parametrize("name", ["config.json", "provenance.json", "metrics.jsonl", "timing.jsonl", "evaluation.json"])
def test_any_value_of_another_kind_is_read_and_shown(tmp_path: Path, name: str) -> None:
    """Nothing but a UserError comes of it, and every run keeps to its line of a list."""
    for folder in ("a", "b"):
        write_run(tmp_path / folder, step=1)
        (tmp_path / folder / "evaluation.json").write_text('{"loss": 3.5, "bits_per_byte": 2.25}')
        change(tmp_path / folder / "provenance.json", earlier=[{"start": "x", "commit": COMMITS[1]}])
    whole, file = registry.read_run(tmp_path / "a"), tmp_path / "b" / name
    count = 0
    for data in changed([json.loads(line) for line in file.read_text().splitlines()]):
        file.write_text("".join(json.dumps(row) + "\n" for row in data))
        broken = registry.read_run(tmp_path / "b")
        text = listing.list_text(listing.listing(tmp_path, in_order([whole, broken], "start"), 2))
        assert len(text.splitlines()) == 3
        text += listing.show_text(listing.show(broken))
        with contextlib.suppress(UserError):
            text += comparison.diff_text(comparison.diff(whole, broken))
        assert all(character.isprintable() or character == "\n" for character in text)
        json.dumps([whole.results, broken.results, broken.settings], allow_nan=False)
        count += 1
    assert count > 20


def corrupt(draw: random.Random, value: Any, file: Path) -> None:
    """Cut a file off, change its bytes, remove it, make it a directory, or change one value or name in its JSON."""
    content = file.read_bytes() if file.is_file() else b""
    act = draw.choice(["cut", "bytes", "remove", "directory", "value", "value", "name", "swap"])
    if not file.is_file() or act in ("remove", "directory"):
        if file.is_dir():
            shutil.rmtree(file)
        else:
            file.unlink(missing_ok=True)
        if act == "directory":
            file.mkdir()
    elif act == "cut":
        file.write_bytes(content[: draw.randrange(len(content) + 1)])
    elif act == "bytes":
        changed = bytearray(content)
        for _ in range(draw.choice((1, 1, 5))):
            changed[draw.randrange(len(changed))] = draw.choice([draw.randrange(256), *b'\n\r{}[],:"0'])
        file.write_bytes(changed)
    else:
        rows = [json.loads(line) for line in content.splitlines()]
        container, key = draw.choice(places(rows))
        if act == "name" and isinstance(container, dict):
            container[f"{key}\n\x1b\ud800"] = container.pop(key)
        elif act == "swap":
            container[key] = draw.choice(places(rows))[0]
            with contextlib.suppress(ValueError):  # a circle
                file.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
            return
        else:
            container[key] = value
        file.write_text("\n".join(json.dumps(row) for row in rows) + "\n")


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, list[dict[str, Any]]]:
    """A root with three runs, of which "b" is another copy of the second, and what is said of them."""
    root, store = tmp_path_factory.mktemp("three"), tmp_path_factory.mktemp("store") / "b"
    for depth, folder in ((2, root / "a"), (3, store), (4, root / "c")):
        write_run(folder, model__depth=depth)
        (folder / "evaluation.json").write_text('{"loss": 3.5, "bits_per_byte": 2.25}')
    shutil.copytree(store, root / "b")
    return root, store, listed(root)


@fuzz(deadline=None, max_examples=100)
@given(st.randoms(use_true_random=False), anything, st.lists(st.sampled_from(FILES), min_size=1, max_size=3))
def test_no_damage_of_one_run_gives_a_traceback_or_hides_another(
    three: tuple[Path, Path, list[dict[str, Any]]], draw: random.Random, value: Any, files: list[str]
) -> None:
    """Any file of it cut off, changed, removed; what is said of the others stays the same."""
    root, store, before = three
    broken = root / "b"
    shutil.rmtree(broken)
    shutil.copytree(store, broken)
    for file in files:
        with contextlib.suppress(
            ValueError, LookupError, FileNotFoundError, NotADirectoryError
        ):  # it was spoilt already
            corrupt(draw, value, broken / file)
    after = listed(root, "--sort=model.depth")
    for entry in (before[0], before[2]):
        (same,) = [e for e in after if e["run"] == entry["run"]]
        assert {**same, "differs": 0} == {**entry, "differs": 0}
        assert same["differs"]["depth"] == entry["differs"]["depth"]
    exists = os.path.lexists(broken / "config.json")
    assert len(after) == 3 if exists else len(after) == 2
    found = run("runs", "list", f"--root={root}", "--where=step>=0")
    assert found.status == 0 and len(found.out.splitlines()) == 1 + len(after), found
    show, diff, other = ["show", str(broken)], ["diff", str(root / "a"), str(broken)], ["diff", str(broken), "--json"]
    for words in (show, [*show, "--json"], diff, [*other, str(root / "c")]):
        found = run("runs", *words)
        found.out.encode()  # whatever a name or a value holds
        refused = found.status == 2 and len(found.err.splitlines()) == 1
        assert found.status == 0 or (refused and (not exists or words[0] == "diff")), found


def test_a_directory_that_cannot_be_read_is_said_and_the_others_are_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b/c", "d"):
        write_run(tmp_path / name)
    iterdir = Path.iterdir

    def closed(path: Path) -> Any:
        if path.name == "b":
            raise PermissionError(13, "Permission denied", str(path))
        return iterdir(path)

    monkeypatch.setattr(Path, "iterdir", closed)
    said: list[str] = []
    assert [entry.directory.name for entry in registry.read_all(tmp_path, said.append)] == ["a", "d"]
    assert said == [f"{tmp_path / 'b'}: cannot be read: Permission denied"]
