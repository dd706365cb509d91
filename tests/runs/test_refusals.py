"""What commands refuse, in one line and with nothing left behind: directories, texts and settings that cannot work."""

import shutil
from pathlib import Path

import pytest

from tests.runs.whole import TRAIN, content, refused
from transformer.errors import UserError
from transformer.files import alone
from transformer.run import claim, make, open_run


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--prompt=" + "x" * 40], ["41", "32"]),
        (["--no_cache", "--piece=3"], ["--piece: has no effect with --no_cache"]),
        (["--no_cache", "--int8_cache"], ["--int8_cache: has no effect with --no_cache"]),
        (["--no_cache", "--draft_blocks=1"], ["--draft_blocks: has no effect with --no_cache"]),
        (["--piece=0"], ["--piece: 0"]),
        (["--proposals=3"], ["--proposals: has no effect without"]),
        (["--draft=run", "--draft_blocks=1"], ["leave one of them out"]),
        (["--draft=run", "--proposals=0"], ["--proposals: 0"]),
        (["--draft=nowhere"], ["nowhere"]),
        (["--draft_blocks=1"], ["a model of one block has no smaller one in it"]),
        (["--prompt=" + "x" * 20, "--tokens=20"], ["21", "20", "32", "--tokens=11"]),
        (["--prompt=\udcff"], ["lone surrogate"]),
        (["--tokens=0"], ["--tokens: 0"]),
        (["--seed=-1"], ["--seed: -1"]),
        (["--checkpoint=later"], ["'later'", "12"]),
        (["--temperature=0", "--top_k=3"], ["--top_k: has no effect"]),
    ],
)
def test_sampling_that_cannot_be_done_is_refused(trained: Path, argv: list[str], words: list[str]) -> None:
    """G07, G14: and nothing of it is printed."""
    line = refused("sample", "--run=run", *argv)
    assert all(word in line for word in words), line


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("missing.txt", None, "no such file"),
        ("empty.txt", b"", ""),
        ("blank.jsonl", b"\n\n", "holds no text"),
        ("void.jsonl", b'{"text": ""}\n', "holds no text"),
        ("binary.txt", b"ab\x00cd", "not a text file"),
        ("latin.txt", b"caf\xe9", "not UTF-8"),
    ],
)
def test_measuring_on_what_is_no_text_is_refused(trained: Path, name: str, data: bytes | None, words: str) -> None:
    if data is not None:
        Path(name).write_bytes(data)
    line = refused("evaluate", "--run=run", f"--text={name}")
    assert words in line and name in line


@pytest.mark.parametrize("stride", ["0", "-1", "33"])
def test_a_stride_that_leaves_tokens_out_is_refused(trained: Path, stride: str) -> None:
    assert f"--stride: {stride} is not between 1 and the context of 32" in refused(
        "evaluate", "--run=run", f"--stride={stride}", "--cache=cache"
    )


def test_a_run_without_a_checkpoint_says_so(trained: Path, tmp_path: Path) -> None:
    shutil.copy(trained / "config.json", tmp_path)
    assert "holds no checkpoint yet" in refused("sample", f"--run={tmp_path}")
    assert "has no records yet" in refused("report", str(tmp_path))
    assert [p.name for p in tmp_path.iterdir()] == ["config.json"]


def test_text_that_has_changed_since_is_not_measured_as_the_validation_split(trained: Path, home: Path) -> None:
    original = (home / "text.txt").read_text()
    try:
        (home / "text.txt").write_text(original + " more")
        assert "was trained on other text" in refused("evaluate", "--run=run", "--cache=other")
    finally:
        (home / "text.txt").write_text(original)


def test_a_directory_of_another_configuration_is_refused_with_the_differences(trained: Path) -> None:
    before = content(trained)
    line = refused(*TRAIN, "--workdir=run", "--config.model.positions=rotary", "--config.train.seed=3")
    assert "train.seed was 0, now 3" in line and "model.positions.kind was 'learned', now 'rotary'" in line
    assert "model.positions.base was 'absent', now 10000.0" in line and "model.depth" not in line
    assert content(trained) == before


def test_a_directory_that_was_taken_since_it_was_free_is_left_alone(trained: Path, tmp_path: Path) -> None:
    """Another process began a run there while this one read its text."""
    before = content(trained)
    with pytest.raises(UserError, match="another process has begun a run in run"):
        claim(Path("run"), open_run(Path("run")).experiment)
    assert content(trained) == before
    make(tmp_path / "new")
    with alone(tmp_path / "new"):
        assert "another process trains" in refused(*TRAIN, f"--workdir={tmp_path / 'new'}")
    assert not content(tmp_path / "new")


def test_a_directory_with_foreign_files_is_refused(home: Path, tmp_path: Path) -> None:
    """K05, K12: also one that holds checkpoints of unknown origin. Nothing is deleted."""
    (tmp_path / "checkpoints" / "20").mkdir(parents=True)
    (tmp_path / "notes.txt").write_text("mine")
    assert "is not empty and holds no run" in refused(*TRAIN, f"--workdir={tmp_path}")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoints", "notes.txt"]
    assert "is a file" in refused(*TRAIN, f"--workdir={tmp_path / 'notes.txt'}")
    assert "cannot write to" in refused(*TRAIN, f"--workdir={tmp_path / 'notes.txt' / 'run'}")


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("nowhere.txt", None, "no such file"),
        ("empty.txt", b"", "is empty"),
        ("newlines.txt", b"\n" * 9, ""),
        ("line.txt", b"one line\n", "can be held out"),
        ("short.txt", b"one\n" * 20, "can be held out"),
        ("binary.txt", b"\x00\x01\x02" * 999, "not a text file: a NUL byte at byte 0"),
        ("latin.txt", b"caf\xe9 " * 999, "not UTF-8: byte 0xE9 at byte 3"),
        ("broken.jsonl", b'{"text": "a"}\n{', "line 2: not JSON"),
        ("fields.jsonl", b'{"txt": "a"}\n', "did you mean 'txt'?"),
        ("damaged.txt.gz", b"no archive", "cannot be read"),
        ("damaged.parquet", b"no table", "not a Parquet file"),
        ("shakespear", None, "did you mean 'shakespeare'?"),
    ],
)
def test_bad_text_is_one_line_and_leaves_nothing(home: Path, name: str, data: bytes | None, words: str) -> None:
    """D16: the directory stays free, so the same command with the right text works."""
    if data is not None:
        (home / name).write_bytes(data)
    line = refused(*TRAIN, "--workdir=bad", f"--config.data.source={name}")
    assert words in line and (name in line or "data.source" in line), line
    assert not (home / "bad").exists()
    assert not [p for p in (home / "cache").iterdir() if p.name.startswith("preparing-")]


def test_text_shorter_than_one_row_is_refused_with_both_numbers(home: Path) -> None:
    """D16: tokens found and needed."""
    (home / "row.jsonl").write_text('{"text": "abc"}\n{"text": "abcd"}\n')
    line = refused(*TRAIN, "--workdir=bad", "--config.data.source=row.jsonl")
    assert "tokens found" in line and "33 needed" in line and not (home / "bad").exists()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (["--config.model.heads=3"], "config.model.heads"),
        (["--config.mesh.data=4", "--config.mesh.tensor=4", "--config.model.heads=4"], "config.mesh"),
        (
            ["--config.model.width=1000000", "--config.model.heads=1"],
            "config.model: its weights and moments alone take ",
        ),
        (["--config.train.init_from=nowhere"], "nowhere: is not a run's directory"),
        (["--config.data.source=python_prose", "--config.data.validation=2"], "data.validation"),
        (["--config.tokenizer=bpe", "--config.tokenizer.vocab_size=90000"], "vocab_size"),
        (["--config.data.weights=1"], "config.data.weights"),
    ],
)
def test_settings_that_cannot_work_leave_nothing(home: Path, changes: list[str], words: str) -> None:
    """T04: also a vocabulary that this text cannot fill."""
    assert words in refused(*TRAIN, "--workdir=bad", *changes)
    assert not (home / "bad").exists()
