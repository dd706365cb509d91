"""Readers: every format gives the same text, and each mistake is one line that names the file."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import fsspec
import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from transformer.data.readers import CHUNK, documents, find
from transformer.errors import UserError

TEXTS = ["one \u00e9\n", "two\r\n \u2581\x00", "three"]


def read(source: object, field: str = "text") -> list[tuple[str, str]]:
    return [(d.name, b"".join(d.chunks()).decode()) for d in documents(str(source), field)]


def lines(texts: list[str], field: str = "text") -> bytes:
    return "".join(json.dumps({field: t, "n": 1}) + "\n" for t in texts).encode()


def zst(content: bytes) -> bytes:
    return zstandard.ZstdCompressor().compress(content)


def parquet(path: Path, texts: list[object], field: str = "text") -> Path:
    pyarrow.parquet.write_table(pyarrow.table({field: texts, "n": [1] * len(texts)}), path)
    return path


PACK: dict[str, Callable[[bytes], bytes]] = {"": bytes, ".gz": gzip.compress, ".zst": zst}


@pytest.mark.parametrize("ending", PACK)
def test_a_text_file_is_one_document(tmp_path: Path, ending: str) -> None:
    content = "\ufeffa\r\nb \u00e9" * 200_000  # more than a chunk, with letters across chunk edges
    path = tmp_path / f"a.txt{ending}"
    path.write_bytes(PACK[ending](content.encode()))
    ((name, text),) = read(path)
    assert name == f"a.txt{ending}" and text == content and len(content.encode()) > CHUNK


@pytest.mark.parametrize("ending", PACK)
@pytest.mark.parametrize("kind", [".jsonl", ".ndjson"])
def test_each_json_line_is_a_document(tmp_path: Path, kind: str, ending: str) -> None:
    path = tmp_path / f"a{kind}{ending}"
    path.write_bytes(PACK[ending](lines(TEXTS, "content") + b"\n"))
    assert read(path, "content") == [(f"{path.name}#{i + 1}", t) for i, t in enumerate(TEXTS)]


def test_zst_of_several_frames(tmp_path: Path) -> None:
    (tmp_path / "a.txt.zst").write_bytes(zst(b"one ") + zst(b"two"))
    assert read(tmp_path / "a.txt.zst")[0][1] == "one two"


def test_each_parquet_row_is_a_document(tmp_path: Path) -> None:
    path = parquet(tmp_path / "a.parquet", TEXTS * 1000)
    assert [t for _, t in read(path)] == TEXTS * 1000 and read(path)[2999][0] == "a.parquet#3000"


def test_a_directory_is_read_in_order_and_leaves_out_what_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / ".git").mkdir()
    for name in ("z.txt", "b/a.md", "a.png", ".hidden.txt", ".git/x.txt"):
        (tmp_path / name).write_bytes(b"text of " + name.encode())
    (tmp_path / "c.jsonl").write_bytes(lines(["x"]))
    assert [name for name, _ in read(tmp_path)] == ["b/a.md", "c.jsonl#1", "z.txt"]
    said: list[str] = []
    assert len(find(str(tmp_path), said.append)) == len(find(tmp_path.as_uri(), said.append)) == 3
    assert len(said) == 2 and all("3 of 6 files are passed over" in line for line in said)
    assert [name for name, _ in read(tmp_path / "**" / "*.txt")] == ["z.txt"]
    assert [name for name, _ in read(tmp_path / "?.txt")] == ["z.txt"]


def test_urls() -> None:
    with fsspec.open("memory://room/a.txt", "wb") as stream:
        stream.write(b"hello")
    with fsspec.open("memory://room/b/c.jsonl.gz", "wb") as stream:
        stream.write(gzip.compress(lines(["x", "y"])))
    assert read("memory://room/a.txt") == [("a.txt", "hello")]
    expected = [("a.txt", "hello"), ("b/c.jsonl.gz#1", "x"), ("b/c.jsonl.gz#2", "y")]
    assert read("memory://room") == expected
    assert read("memory://room/*.txt") == [("a.txt", "hello")]
    with pytest.raises(UserError, match="memory://nowhere: no such file"):
        read("memory://nowhere")
    with pytest.raises(UserError, match="nosuch://x"):
        read("nosuch://x")


def test_file_urls(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"hello")
    assert read(f"file://{tmp_path}/a.txt") == [("a.txt", "hello")]
    parquet(tmp_path / "b.parquet", ["x"])
    assert read(f"file://{tmp_path}/b.parquet") == [("b.parquet#1", "x")]


def wrong(tmp_path: Path, name: str, content: bytes, field: str = "text") -> str:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(UserError) as caught:
        read(path, field)
    message = str(caught.value)
    assert message.startswith(str(path)) and "\n" not in message
    return message.removeprefix(str(path))


def test_missing_files_name_the_nearest(tmp_path: Path) -> None:
    (tmp_path / "books.txt").write_bytes(b"x")
    with pytest.raises(UserError, match=r"boks\.txt: no such file .*did you mean 'books\.txt'"):
        read(tmp_path / "boks.txt")
    with pytest.raises(UserError, match="no such file"):
        read(tmp_path / "nowhere" / "x.txt")
    with pytest.raises(UserError, match="no file matches"):
        read(tmp_path / "*.nothing")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="no text files"):
        read(tmp_path / "empty")


def test_binary_files_say_where(tmp_path: Path) -> None:
    assert wrong(tmp_path, "a.txt", b"ab\x00c") == ": not a text file: a NUL byte at byte 2"
    assert wrong(tmp_path, "a.txt", b"abc\xff") == ": not UTF-8: byte 0xFF at byte 3"
    late = b"x" * (CHUNK - 1) + "\u00e9".encode() + b"ab\xe9c"
    assert wrong(tmp_path, "a.txt", late) == f": not UTF-8: byte 0xE9 at byte {CHUNK + 3}"
    split = b"x" * (CHUNK - 1) + b"\xe2a"
    assert wrong(tmp_path, "a.txt", split) == f": not UTF-8: byte 0xE2 at byte {CHUNK - 1}"
    assert "ends inside a character" in wrong(tmp_path, "a.txt", b"ab\xc3")


def test_json_mistakes_say_which_line(tmp_path: Path) -> None:
    good = lines(["x"])
    assert ", line 2: not JSON" in wrong(tmp_path, "a.jsonl", good + b"{oops\n")
    assert ", line 2: no field 'text'" in wrong(tmp_path, "a.jsonl", good + b"[1]\n")
    near = wrong(tmp_path, "a.jsonl", lines(["x"], "content"), "contents")
    assert near == ", line 1: no field 'contents' (did you mean 'content'?)"
    assert "'text' is int, not text" in wrong(tmp_path, "a.jsonl", b'{"text": 3}')
    assert "lone surrogate" in wrong(tmp_path, "a.jsonl", b'{"text": "a\\ud800"}')
    assert "line 1: not JSON" in wrong(tmp_path, "a.jsonl", b"\xff\xfe\n")


def test_parquet_mistakes(tmp_path: Path) -> None:
    path = parquet(tmp_path / "a.parquet", ["x"], "body")
    with pytest.raises(UserError, match=r"a\.parquet: no column 'text' \(there are: body, n\)"):
        read(path)
    assert "not a Parquet file" in wrong(tmp_path, "b.parquet", b"text")
    assert "unpack the file first" in wrong(tmp_path, "d.parquet.zst", zst(path.read_bytes()))
    with pytest.raises(UserError, match="row 2: 'text' is NoneType"):
        read(parquet(tmp_path / "c.parquet", ["x", None]))


@pytest.mark.parametrize(("ending", "pack"), [(".gz", gzip.compress), (".zst", zst)])
@pytest.mark.parametrize("kind", ["txt", "jsonl"])
def test_damaged_archives(tmp_path: Path, kind: str, ending: str, pack: Callable[[bytes], bytes]) -> None:
    content = lines([str(i * 7919) for i in range(9000)])
    assert wrong(tmp_path, f"a.{kind}{ending}", pack(content)[:-9])
    assert wrong(tmp_path, f"a.{kind}{ending}", b"no archive at all")


def test_an_option_without_effect_is_refused(tmp_path: Path) -> None:
    assert read_one(tmp_path, "a.txt", b"x") == "x"
    with pytest.raises(UserError, match=r"text_field: 'content' has no effect"):
        read(tmp_path / "a.txt", "content")


def read_one(tmp_path: Path, name: str, content: bytes) -> str:
    (tmp_path / name).write_bytes(content)
    return read(tmp_path / name)[0][1]
