"""The token store: what is written is read back, and anything else is refused by name."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from transformer.data.packing import Packing
from transformer.data.store import HEADER_BYTES, TokenStore, Writer
from transformer.errors import UserError


def write(
    path: Path, vocab_size: int = 257, pieces: tuple[tuple[int, ...], ...] = ((256, 1, 2), (256, 3, 256))
) -> Path:
    with Writer(path, vocab_size, "print") as writer:
        for i, ids in enumerate(pieces):
            writer.add(ids, 10 + i, i // 2, i % 2 == 1)
    return path


def test_reads_back_what_was_written(tmp_path: Path) -> None:
    store = TokenStore(write(tmp_path / "a.train"), 257, "print")
    assert store.tokens_S.tolist() == [256, 1, 2, 256, 3, 256] and store.tokens_S.dtype == np.uint16
    assert store.piece(1).tolist() == [256, 3, 256] and store.piece(1).dtype == np.int32
    assert store.offset_P.tolist() == [0, 3] and store.count_P.tolist() == [3, 3]
    assert store.source_bytes_P.tolist() == [10, 11] and store.is_last_P.tolist() == [0, 1]
    assert (store.tokens, store.pieces, store.documents, store.source_bytes) == (6, 2, 1, 21)
    store.verify()
    assert [p.name for p in tmp_path.iterdir()] == ["a.train"], "no temporary files stay"


def test_T09_large_ids_do_not_wrap(tmp_path: Path) -> None:
    store = TokenStore(write(tmp_path / "a", 100_000, ((70_000, 65_535, 65_536),)))
    assert store.piece(0).tolist() == [70_000, 65_535, 65_536] and store.header["width"] == 4
    assert TokenStore(write(tmp_path / "b", 65_536, ((65_535, 0),))).header["width"] == 2
    assert TokenStore(write(tmp_path / "c", 65_537, ((65_536, 0),))).header["width"] == 4


@pytest.mark.parametrize("wrong", [257, 65_536 + 3, -1])
def test_T09_ids_outside_the_vocabulary_are_refused_at_write(tmp_path: Path, wrong: int) -> None:
    with pytest.raises(UserError, match=f"token id {wrong} is outside the vocabulary of 257"):
        write(tmp_path / "a", 257, ((1, wrong),))
    assert not list(tmp_path.iterdir()), "nothing half-written stays"


@pytest.mark.parametrize("tokens", [1, 2, 3, 5, 7])
def test_T10_odd_counts_at_either_width(tmp_path: Path, tokens: int) -> None:
    for vocab_size in (257, 100_000):
        store = TokenStore(write(tmp_path / f"{vocab_size}", vocab_size, (tuple(range(tokens)), (9,))))
        assert store.piece(0).tolist() == list(range(tokens)) and store.piece(1).tolist() == [9]
        store.verify()


def test_T10_another_tokenizer_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.train")
    with pytest.raises(UserError, match=r"a\.train: .* vocab_size is 257, expected 300"):
        TokenStore(path, 300, "print")
    with pytest.raises(UserError, match=r"a\.train: .* fingerprint is print, expected other"):
        TokenStore(path, 257, "other")


@pytest.mark.parametrize("keep", [0, 7, 100, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + 3, -1])
def test_a_truncated_file_is_refused(tmp_path: Path, keep: int) -> None:
    path = write(tmp_path / "a.train")
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(UserError, match=r"a\.train: (damaged|not a token store)"):
        TokenStore(path)


@pytest.mark.parametrize("place", [0, 5, 8, 39, 40, 60, 200])
def test_a_changed_header_is_refused(tmp_path: Path, place: int) -> None:
    path = write(tmp_path / "a.train")
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"a\.train: "):
        TokenStore(path)


def test_a_flipped_bit_in_the_content_is_found(tmp_path: Path) -> None:
    for place in (HEADER_BYTES, HEADER_BYTES + 13, -1):
        path = write(tmp_path / "a.train")
        content = bytearray(path.read_bytes())
        content[place] ^= 4
        path.write_bytes(content)
        with pytest.raises(UserError, match="does not match its hash"):
            TokenStore(path).verify()


@pytest.mark.parametrize("content", [b"", b"\x01\x00\x02\x00", b"plain text " * 1000])
def test_T10_a_foreign_file_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "tokens.bin"
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"tokens\.bin: not a token store"):
        TokenStore(path)
    with pytest.raises(UserError, match="cannot read"):
        TokenStore(tmp_path / "missing")


def test_another_format_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a")
    monkeypatch.setattr("transformer.data.store.VERSION", 2)
    with pytest.raises(UserError, match="written in format 1, this version reads 2"):
        TokenStore(path)


def test_D19_a_piece_longer_than_16_bits_can_count(tmp_path: Path) -> None:
    store = TokenStore(write(tmp_path / "a", 257, ((7,) * 65_537, (8, 9))))
    assert store.count_P.tolist() == [65_537, 2] and store.piece(1).tolist() == [8, 9]
    assert store.count_P.dtype == store.offset_P.dtype == np.int64


def test_D19_offsets_beyond_32_bits(tmp_path: Path) -> None:
    """A sparse store of 2**32 + 64 two-byte tokens: row addresses must not wrap at 2**33 bytes."""
    path = write(tmp_path / "big", 257, ((1, 2),) * 2)
    content, tokens = path.read_bytes(), 2**32 + 64
    header = json.loads(content[40:HEADER_BYTES]) | {"tokens": tokens}
    text = json.dumps(header).encode().ljust(HEADER_BYTES - 40)
    import hashlib

    with open(path, "wb") as stream:
        stream.write(content[:8] + hashlib.sha256(text).digest() + text)
        stream.seek(HEADER_BYTES + 2 * (tokens - 64))
        stream.write(np.arange(64, dtype="<u2").tobytes())
        stream.write(np.array([[0, tokens - 64, 0, 0, 0], [tokens - 64, 64, 0, 1, 1]], "<i8").tobytes())
    packing = Packing(TokenStore(path), 4096, seed=0)
    epoch = next(e for e in range(100) if packing.order(e)[0][-1] == 1)  # the far piece comes last
    tail = packing.rows([packing.rows_per_epoch - 1], epoch)
    assert 63 in tail.tokens_BT and 62 in tail.targets_BT


def test_a_killed_writer_leaves_no_store(tmp_path: Path) -> None:
    code = (
        "import os, sys; from transformer.data.store import Writer\n"
        "with Writer(sys.argv[1], 257, 'x') as w:\n    w.add([1] * 9999, 1, 0, True); os.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "a.train")])
    assert done.returncode == -9 and not (tmp_path / "a.train").exists()
