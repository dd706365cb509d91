"""Files to documents, streamed: plain text, JSON lines and Parquet; local, globbed, or at any URL.

A plain text file is one document; each line of a JSON lines file and each row of a Parquet file is one.
Text is handed out as chunks of UTF-8 bytes exactly as they lie in the file (a byte order mark at the
start stays part of the text), so a document may be larger than memory.
"""

import codecs
import glob
import gzip
import io
import json
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

from transformer.data.zstd import ZstdReader
from transformer.errors import UserError, did_you_mean

TEXT = (".txt", ".md")
JSON_LINES = (".jsonl", ".ndjson", ".json")
PACKED = (".gz", ".zst")
CHUNK = 1 << 20
_ROWS = 1024  # Parquet rows in memory at a time
_EARLY = 8192  # a NUL byte this near the start means a binary file


@dataclass(frozen=True)
class Document:
    """One text: ``name`` is the same on every machine, ``chunks()`` gives its UTF-8 bytes."""

    name: str
    chunks: Callable[[], Iterator[bytes]]


@dataclass(frozen=True)
class File:
    """One file: ``name`` is relative to the source, ``stamp`` changes whenever the content may have.

    ``size`` is in bytes, -1 where it is not known.
    """

    name: str
    path: str
    size: int
    stamp: str
    system: Any = None  # an fsspec file system, None for a local file

    @property
    def has_fields(self) -> bool:
        """Whether its text lies under a named field."""
        return _kind(self.path) in JSON_LINES or _kind(self.path) == ".parquet"

    @contextmanager
    def open(self) -> Iterator[BinaryIO]:
        """The content, decompressed by its ending. Raises UserError when it cannot be read."""
        with ExitStack() as stack:
            try:
                opening: Any = self.system.open if self.system else open
                stream = stack.enter_context(opening(self.path, "rb"))
            except OSError as error:
                raise UserError(f"{self.path}: cannot be read: {error.strerror or error}") from None
            if self.path.endswith(".gz"):
                stream = stack.enter_context(gzip.open(stream))
            elif self.path.endswith(".zst"):
                try:
                    stream = stack.enter_context(io.BufferedReader(ZstdReader(stream), CHUNK))
                except ImportError:
                    raise UserError(f"{self.path}: reading .zst needs: pip install zstandard") from None
            yield stream


def documents(source: str, text_field: str = "text") -> Iterator[Document]:
    """Every document of a file, directory, glob or URL, in a fixed order. A UserError names the file."""
    files = find(source)
    check_text_field(files, text_field, source)
    for file in files:
        yield from read(file, text_field)


def check_text_field(files: Sequence[File], text_field: str, source: str) -> None:
    """Refuse a text_field that changes nothing."""
    if text_field != "text" and not any(file.has_fields for file in files):
        raise UserError(f"data.text_field: {text_field!r} has no effect: {source} has no JSON lines and no Parquet")


def find(source: str, log: Callable[[str], None] = lambda line: None) -> list[File]:
    """The files of ``source`` in the order of their names. Raises UserError when there are none.

    ``log`` is told about files of a directory that are passed over for their endings.
    """
    if "://" in source:
        return _find_remote(source, log)
    path = Path(source).expanduser()
    if path.is_file():
        return [_local(path, path.name)]
    if path.is_dir():
        found = sorted(
            os.path.join(folder, name) for folder, _, names in os.walk(path, followlinks=True) for name in names
        )
        files = [(Path(p), Path(p).relative_to(path).as_posix()) for p in found]
        kept = [(p, name) for p, name in files if _wanted(name)]
        if not kept:
            raise UserError(f"{source}: no text files in this directory (looked for {_endings()})")
        _tell_passed_over(source, [name for _, name in files], log)
        return [_local(p, name) for p, name in kept]
    if glob.has_magic(source):
        matches = sorted(Path(p) for p in glob.glob(str(path), recursive=True) if os.path.isfile(p))
        if not matches:
            raise UserError(f"{source}: no file matches this pattern")
        root = os.path.commonpath([p.parent for p in matches])
        return [_local(p, p.relative_to(root).as_posix()) for p in matches]
    folder = path.parent
    near = did_you_mean(path.name, (p.name for p in folder.iterdir())) if folder.is_dir() else ""
    raise UserError(f"{source}: no such file or directory{near if 'mean' in near else ''}")


def read(file: File, text_field: str) -> Iterator[Document]:
    """The documents of one file."""
    if file.size == 0:
        return
    if _kind(file.path) == ".parquet":
        if file.path.lower().endswith(PACKED):
            raise UserError(f"{file.path}: Parquet is compressed inside; unpack the file first")
        yield from _rows(file, text_field)
    elif _kind(file.path) in JSON_LINES:
        yield from _lines(file, text_field)
    else:
        yield Document(file.name, lambda: _plain(file))


def _plain(file: File) -> Iterator[bytes]:
    decoder = codecs.getincrementaldecoder("utf-8")()
    offset = 0
    for chunk in _blocks(file):
        nul = chunk.find(b"\x00", 0, max(_EARLY - offset, 0))
        if nul >= 0:
            raise UserError(f"{file.path}: not a text file: a NUL byte at byte {offset + nul}")
        pending = len(decoder.getstate()[0])
        try:
            decoder.decode(chunk)
        except UnicodeDecodeError as error:
            raise UserError(
                f"{file.path}: not UTF-8: byte 0x{error.object[error.start]:02X} at byte "
                f"{offset - pending + error.start}"
            ) from None
        offset += len(chunk)
        yield chunk
    if decoder.getstate()[0]:
        raise UserError(f"{file.path}: not UTF-8: ends inside a character at byte {offset}")


def _blocks(file: File) -> Iterator[bytes]:
    with file.open() as stream:
        while chunk := _guard(file, lambda: stream.read(CHUNK)):
            yield chunk


def _guard(file: File, action: Callable[[], Any]) -> Any:
    """Run a read; a broken archive or disk is the user's to know about, in one line."""
    try:
        return action()
    except (OSError, EOFError) as error:
        raise UserError(f"{file.path}: cannot be read: {error}") from None
    except Exception as error:
        if type(error).__name__ in ("ZstdError", "error", "ArrowInvalid"):
            raise UserError(f"{file.path}: damaged: {error}") from None
        raise


def _lines(file: File, text_field: str) -> Iterator[Document]:
    with file.open() as stream:
        lines = io.BufferedReader(cast(io.RawIOBase, stream), CHUNK)
        number = 0
        while line := _guard(file, lines.readline):
            number += 1
            if not line.strip():
                continue
            where = f"{file.path}, line {number}"
            try:
                record = json.loads(line)
            except ValueError as error:
                raise UserError(f"{where}: not JSON: {error}") from None
            if not isinstance(record, dict) or text_field not in record:
                fields = record if isinstance(record, dict) else ()
                raise UserError(f"{where}: no field {text_field!r}{did_you_mean(text_field, fields)}")
            yield _document(f"{file.name}#{number}", record[text_field], where, text_field)


def _rows(file: File, text_field: str) -> Iterator[Document]:
    try:
        import pyarrow as arrow
        import pyarrow.parquet as parquet
    except ImportError:
        raise UserError(f"{file.path}: reading Parquet needs: pip install pyarrow") from None
    with file.open() as stream:
        try:
            table = parquet.ParquetFile(stream)
        except arrow.ArrowInvalid as error:
            raise UserError(f"{file.path}: not a Parquet file: {error}") from None
        if text_field not in table.schema_arrow.names:
            raise UserError(
                f"{file.path}: no column {text_field!r}{did_you_mean(text_field, table.schema_arrow.names)}"
            )
        number = 0
        batches = table.iter_batches(_ROWS, columns=[text_field])
        while (batch := _guard(file, lambda: next(batches, None))) is not None:
            for text in batch.column(0).to_pylist():
                number += 1
                yield _document(f"{file.name}#{number}", text, f"{file.path}, row {number}", text_field)


def _document(name: str, text: Any, where: str, text_field: str) -> Document:
    if not isinstance(text, str):
        raise UserError(f"{where}: {text_field!r} is {type(text).__name__}, not text")
    try:
        content = text.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{where}: a lone surrogate at character {error.start} is no text") from None
    return Document(name, lambda: iter((content,)))


def _kind(path: str) -> str:
    stem, ending = os.path.splitext(path.lower())
    return os.path.splitext(stem)[1] if ending in PACKED else ending


def _wanted(name: str) -> bool:
    hidden = any(part.startswith(".") for part in name.split("/"))
    return not hidden and _kind(name) in (*TEXT, *JSON_LINES, ".parquet")


def _endings() -> str:
    return ", ".join((*TEXT, *JSON_LINES, ".parquet", *PACKED))


def _local(path: Path, name: str) -> File:
    try:
        stat = path.stat()
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from None
    return File(name, str(path), stat.st_size, str(stat.st_mtime_ns))


def _tell_passed_over(source: str, names: Sequence[str], log: Callable[[str], None]) -> None:
    others = [name for name in names if not _wanted(name)]
    if others:
        log(f"{source}: {len(others)} of {len(names)} files are passed over (not {_endings()}), such as {others[0]}")


def _find_remote(source: str, log: Callable[[str], None]) -> list[File]:
    try:
        import fsspec
    except ImportError:
        raise UserError(f"{source}: reading from a URL needs: pip install fsspec") from None
    logging.getLogger("gcsfs").setLevel(logging.CRITICAL)  # which tells of each retry with a traceback, and raises too
    try:
        system, path = fsspec.core.url_to_fs(source)
        if source.startswith(("http://", "https://")):
            found = [path]  # a "?" there starts a query, and a page with links is no directory
        elif glob.has_magic(path):
            found = sorted(p for p in system.glob(path) if system.isfile(p))
        elif system.isdir(path):
            inside = {p: os.path.relpath(p, path) for p in sorted(system.find(path))}
            found = [p for p, name in inside.items() if _wanted(name)]
            _tell_passed_over(source, list(inside.values()), log)
        else:
            found = [path] if system.exists(path) else []
        infos = [(p, system.info(p)) for p in found]
    except (ImportError, ValueError) as error:  # fsspec: an unknown protocol, or its package is missing
        raise UserError(f"{source}: {str(error).splitlines()[0]}") from None
    except Exception as error:  # each store has errors of its own, and none is ours
        raise UserError(f"{source}: cannot be reached: {type(error).__name__}: {error}") from None
    if not infos:
        raise UserError(f"{source}: no such file, and no text files under it (looked for {_endings()})")
    root = os.path.commonpath([os.path.dirname(p) for p, _ in infos])
    stamps = ("mtime", "ETag", "etag", "md5Hash", "updated", "LastModified", "created")
    return [
        File(
            name=os.path.relpath(p, root),
            path=p,
            size=-1 if info.get("size") is None else int(info["size"]),  # a server need not say
            stamp=next((str(info[s]) for s in stamps if info.get(s)), ""),
            system=system,
        )
        for p, info in infos
    ]
