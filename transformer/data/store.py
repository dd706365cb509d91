"""Pieces of token ids on disk, memory-mapped: one file that says what it is.

Layout: a 4096-byte header, the tokens (2 or 4 bytes each, little-endian), zeros up to a multiple of 8,
then the piece table (5 int64 columns). The header is JSON with its own hash; it holds the format's
version, the width of a token, the tokenizer's fingerprint and vocabulary, all counts, and the sha256 of
what follows. It is written last and the file renamed into place after it, so a killed writer leaves
nothing that could pass for a store.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from transformer.errors import UserError

MAGIC = b"DECTOKEN"
VERSION = 1
HEADER_BYTES = 4096
COLUMNS = ("offset", "count", "source_bytes", "document", "is_last")
_PREFIX = len(MAGIC) + 32  # magic, sha256 of the JSON


class TokenStore:
    """An open store.

    tokens_S: uint16 or uint32, all pieces one after another. Of each of the P pieces: offset_P (its first
    token in tokens_S), count_P (its tokens), source_bytes_P (the UTF-8 bytes it came from), document_P
    (index of its document in the split's manifest), is_last_P (1 where it ends its document); all int64.
    """

    def __init__(self, path: str | Path, vocab_size: int | None = None, fingerprint: str | None = None):
        """Map the file. Raises UserError when it is no whole store, or not of the tokenizer given."""
        self.path = Path(path)
        self.header = _read_header(self.path)
        for name, wanted in (("vocab_size", vocab_size), ("fingerprint", fingerprint)):
            found = self.header[name]
            if wanted is not None and found != wanted:
                raise UserError(f"{path}: written with another tokenizer: {name} is {found}, expected {wanted}")
        self.vocab_size: int = self.header["vocab_size"]
        self.fingerprint: str = self.header["fingerprint"]
        self.tokens = int(self.header["tokens"])
        self.pieces = int(self.header["pieces"])
        self.documents = int(self.header["documents"])
        self.source_bytes = int(self.header["source_bytes"])
        self.sha256: str = self.header["sha256"]
        dtype = np.dtype(f"<u{self.header['width']}")
        table = _table_offset(self.tokens, dtype.itemsize)
        expected = table + self.pieces * 8 * len(COLUMNS)
        size = self.path.stat().st_size
        if size != expected:
            raise UserError(f"{path}: damaged: {size} bytes where the header says {expected}; delete it to rebuild")
        self.tokens_S = _map(self.path, dtype, HEADER_BYTES, (self.tokens,))
        table_P5 = _map(self.path, np.dtype("<i8"), table, (self.pieces, len(COLUMNS)))
        self.offset_P, self.count_P, self.source_bytes_P, self.document_P, self.is_last_P = table_P5.T

    def piece(self, index: int) -> npt.NDArray[np.int32]:
        """The ids of one piece."""
        start = int(self.offset_P[index])
        return self.tokens_S[start : start + int(self.count_P[index])].astype(np.int32)

    def verify(self) -> None:
        """Read everything and compare with the header's hash. Raises UserError where they differ."""
        digest = hashlib.sha256()
        with open(self.path, "rb") as stream:
            stream.seek(HEADER_BYTES)
            while block := stream.read(1 << 20):
                digest.update(block)
        if digest.hexdigest() != self.sha256:
            raise UserError(f"{self.path}: damaged: its content does not match its hash; delete it to rebuild")


class Writer:
    """Writes a store piece by piece: ``with Writer(...) as w: w.add(...)``. An exception leaves no file."""

    def __init__(self, path: str | Path, vocab_size: int, fingerprint: str):
        self.path = Path(path)
        self._partial = self.path.with_name(self.path.name + f".partial-{os.getpid()}")
        self._table_path = self._partial.with_name(self._partial.name + "-table")
        self._header: dict[str, Any] = {
            "version": VERSION,
            "vocab_size": vocab_size,
            "fingerprint": fingerprint,
        }
        self._dtype = np.dtype("<u2") if vocab_size <= 1 << 16 else np.dtype("<u4")
        self._vocab_size = vocab_size
        self._tokens = self._pieces = self._source_bytes = 0
        self._documents: int = 0

    def __enter__(self) -> "Writer":
        self._file = open(self._partial, "wb")
        self._table = open(self._table_path, "wb")
        self._file.write(bytes(HEADER_BYTES))
        self._digest = hashlib.sha256()
        return self

    def add(self, ids: Sequence[int] | npt.NDArray[Any], source_bytes: int, document: int, is_last: bool) -> None:
        """One piece. Raises UserError for an id outside the vocabulary, rather than let it wrap."""
        ids_T = np.asarray(ids, np.int64)
        wrong_T = ids_T[(ids_T < 0) | (ids_T >= self._vocab_size)]
        if wrong_T.size:
            raise UserError(f"{self.path}: token id {wrong_T[0]} is outside the vocabulary of {self._vocab_size}")
        content = ids_T.astype(self._dtype).tobytes()
        self._file.write(content)
        self._digest.update(content)
        row = (self._tokens, ids_T.size, source_bytes, document, int(is_last))
        self._table.write(np.array(row, "<i8").tobytes())
        self._tokens += ids_T.size
        self._pieces += 1
        self._source_bytes += source_bytes
        self._documents += int(is_last)

    def __exit__(self, kind: type[BaseException] | None, value: object, trace: TracebackType | None) -> None:
        try:
            if kind is None:
                self._finish()
        finally:
            self._file.close()
            self._table.close()
            self._table_path.unlink(missing_ok=True)
            self._partial.unlink(missing_ok=True)

    def _finish(self) -> None:
        written = HEADER_BYTES + self._tokens * self._dtype.itemsize
        padding = bytes(_table_offset(self._tokens, self._dtype.itemsize) - written)
        self._file.write(padding)
        self._digest.update(padding)
        self._table.close()
        with open(self._table_path, "rb") as table:
            while block := table.read(1 << 20):
                self._digest.update(block)
            table.seek(0)
            shutil.copyfileobj(table, self._file, 1 << 20)
        self._header |= {
            "width": self._dtype.itemsize,
            "tokens": self._tokens,
            "pieces": self._pieces,
            "documents": self._documents,
            "source_bytes": self._source_bytes,
            "sha256": self._digest.hexdigest(),
        }
        text = json.dumps(self._header, sort_keys=True).encode().ljust(HEADER_BYTES - _PREFIX)
        self._file.seek(0)
        self._file.write(MAGIC + hashlib.sha256(text).digest() + text)
        self._file.flush()
        os.fsync(self._file.fileno())
        os.replace(self._partial, self.path)


def _table_offset(tokens: int, width: int) -> int:
    return HEADER_BYTES + -(-tokens * width // 8) * 8


def _map(path: Path, dtype: np.dtype[Any], offset: int, shape: tuple[int, ...]) -> npt.NDArray[Any]:
    if 0 in shape:  # nothing to map
        return np.zeros(shape, dtype)
    return np.memmap(path, dtype, "r", offset, shape)


def _read_header(path: Path) -> dict[str, Any]:
    try:
        with open(path, "rb") as stream:
            head = stream.read(HEADER_BYTES)
    except OSError as error:
        raise UserError(f"{path}: cannot read the token store: {error.strerror or error}") from None
    if head[: len(MAGIC)] != MAGIC:
        raise UserError(f"{path}: not a token store of this project (its first bytes are {head[:8]!r})")
    text = head[_PREFIX:]
    if len(head) < HEADER_BYTES or hashlib.sha256(text).digest() != head[len(MAGIC) : _PREFIX]:
        raise UserError(f"{path}: damaged: its header is incomplete or changed; delete it to rebuild")
    header: dict[str, Any] = json.loads(text)
    if header["version"] != VERSION:
        raise UserError(f"{path}: written in format {header['version']}, this version reads {VERSION}")
    return header
