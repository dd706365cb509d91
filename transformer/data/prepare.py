"""From a source's name to token stores: read, split, train the tokenizer, encode; once, then from a cache.

A cache entry is a directory named by everything it depends on. It is built under another name and renamed
when whole: a killed process leaves nothing that passes for an entry, and of several that build the same
one, the first to finish wins and the others drop theirs.

    tokenizer.model         absent for bytes
    source_0.manifest.jsonl which documents were held out (split.py)
    source_0.train, source_0.validation     token stores (store.py)
    summary.json            hashes of the above, and the report
"""

import hashlib
import json
import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from transformer.data import corpora, readers, split, tokenizer_training
from transformer.data.corpora import Source
from transformer.data.loader import Loader
from transformer.data.pieces import cut
from transformer.data.store import TokenStore, Writer
from transformer.data.tasks.source import AnyTask, TaskLoader
from transformer.data.tasks.task import Task
from transformer.data.tokenizer import (
    Bytes,
    ByteTokenizer,
    Imported,
    Symbols,
    SymbolTokenizer,
    Tokenizer,
    TokenizerConfig,
    load,
)
from transformer.errors import UserError
from transformer.parallel import hosts
from transformer.settings import settings, tag_of, to_dict

FORMAT = 3  # raise it when the same settings would give other files
_BATCH_BYTES = 1 << 21
Log = Callable[[str], None]


@settings
class Data:
    """Which text to train on, and in which order.

    source: a bundled corpus, a path, a glob or a URL; several separated by commas; or a synthetic task, with
    settings of its own and without those of texts below.
    weights: the sources' shares of rows; empty for shares in proportion to their size.
    text_field: the field (JSON lines) or column (Parquet) that holds the text.
    validation: the share of the bytes held out, in whole documents where there are several.
    piece_bytes: documents longer than this are cut at multiples of it.
    seed: the order of the pieces; it changes neither the split nor the tokenizer.
    """

    source: str | AnyTask = "shakespeare"
    weights: tuple[float, ...] = ()
    text_field: str = "text"
    validation: float = 0.1
    piece_bytes: int = 4096
    seed: int = 0


@dataclass(frozen=True)
class Prepared:
    """The tokenizer, one store per source for each side of the split (none of a synthetic task), and what was done.

    content_hash: of the documents, the split and the cuts; the same for every tokenizer.
    """

    tokenizer: Tokenizer
    train: list[TokenStore]
    validation: list[TokenStore]
    report: dict[str, Any]
    content_hash: str
    directory: Path


def loader(data: Data, prepared: Prepared, batch: int, context: int) -> Loader:
    """Batches of ``batch`` rows of ``context`` positions, from the text or from the task."""
    if isinstance(data.source, Task):
        return TaskLoader(data.source, data.seed, batch, context)
    return Loader(prepared.train, data.weights, data.seed, batch, context)


def prepare(data: Data, tokenizer: TokenizerConfig, cache: Path, log: Log = lambda line: None) -> Prepared:
    """Everything that training needs of ``data``, from ``cache`` where it was prepared before.

    ``log`` gets a line now and then. Raises UserError for whatever is wrong with the settings or the text.
    Of several processes the first goes before the others: they find what it made, or where their cache is another,
    make the same.
    """
    if not hosts.is_first():
        hosts.barrier("prepared")
    prepared = _prepare(data, tokenizer, cache, log)
    if hosts.is_first():
        hosts.barrier("prepared")
    if hosts.agree(lambda: prepared.content_hash) != prepared.content_hash:
        raise UserError(f"data.source: {data.source} holds other text here than it does for process 0")
    return prepared


def _prepare(data: Data, tokenizer: TokenizerConfig, cache: Path, log: Log) -> Prepared:
    cache = Path(cache).expanduser()
    if isinstance(data.source, Task):
        report = {"task": {"kind": tag_of(type(data.source))} | to_dict(data.source)}
        return Prepared(SymbolTokenizer(data.source.symbols), [], [], report, data.source.content_hash, cache)
    check(data)
    try:
        cache.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{cache}: cannot be used as a cache: {error.strerror}") from None
    sources = [corpora.source(name, data.text_field, cache, log) for name in _names(data)]
    files = [file for source in sources for file in source.files]
    readers.check_text_field(files, data.text_field, data.source)
    if data.validation != 0.1 and all(source.held_out is not None for source in sources):
        raise UserError(f"data.validation: {data.validation} has no effect: {data.source} has a fixed split")
    settings_used = {
        "format": FORMAT,
        "sources": [[source.name, source.identity] for source in sources],
        "tokenizer": {"kind": tag_of(type(tokenizer))} | to_dict(tokenizer),
        "validation": data.validation,
        "piece_bytes": data.piece_bytes,
    }
    key = hashlib.sha256(json.dumps(settings_used, sort_keys=True).encode()).hexdigest()[:16]
    entry = cache / f"prepared-{key}"
    if not entry.exists():
        _clean(cache)
        with tempfile.TemporaryDirectory(dir=cache, prefix=_mine(), ignore_cleanup_errors=True) as work:
            _build(Path(work) / "entry", sources, data, tokenizer, settings_used, log)
            try:
                os.rename(Path(work) / "entry", entry)
            except OSError:
                if not entry.exists():  # else another process was first, with the same content
                    raise
    return _open(entry, tokenizer)


def _names(data: Data) -> list[str]:
    assert isinstance(data.source, str)  # and no task
    return [name.strip() for name in data.source.split(",")]


def check(data: Data) -> None:
    """UserError for settings of texts that no text could have."""
    names = _names(data)
    if not all(names):
        raise UserError(f"data.source: {data.source!r} has an empty name in it")
    if data.weights and len(data.weights) != len(names):
        raise UserError(f"data.weights: {len(data.weights)} weights for {len(names)} sources")
    if any(weight <= 0 for weight in data.weights):
        raise UserError(f"data.weights: {data.weights} must all be above 0")
    if not 0 < data.validation < 1:
        raise UserError(f"data.validation: {data.validation} must be above 0 and below 1")
    if data.piece_bytes < 64:
        raise UserError(f"data.piece_bytes: {data.piece_bytes} must be at least 64")


def _build(
    entry: Path,
    sources: Sequence[Source],
    data: Data,
    config: TokenizerConfig,
    used: dict[str, Any],
    log: Log,
) -> None:
    entry.mkdir()
    manifests = [entry / f"source_{i}.manifest.jsonl" for i in range(len(sources))]
    split.write_manifests(sources, manifests, data.validation, data.piece_bytes, log)
    report: dict[str, Any] = {"settings": used, "tokenizer": {"kind": "bytes", "vocab_size": 257}}
    tokenizer: Tokenizer
    if isinstance(config, Bytes):
        tokenizer = ByteTokenizer()
    elif isinstance(config, Imported):
        if not config.path:
            raise UserError("config.tokenizer.path: is missing: the directory of the run that was imported")
        tokenizer = load(config, entry)
        report["tokenizer"] = {"kind": "imported", "vocab_size": tokenizer.vocab_size}
    else:
        size = sum(_sizes(m)["train"]["bytes"] for m in manifests)
        log(f"training the tokenizer on {min(size, tokenizer_training.TRAINING_BYTES) / 1e6:.1f} MB")
        texts = chain.from_iterable(
            _training_text(s, m, data.piece_bytes) for s, m in zip(sources, manifests, strict=True)
        )
        assert not isinstance(config, Symbols)  # which are for tasks
        tokenizer, report["tokenizer"] = tokenizer_training.train(config, texts, size)
    tokenizer.save(entry)
    for i, (source, manifest) in enumerate(zip(sources, manifests, strict=True)):
        _encode(source, manifest, entry / f"source_{i}", tokenizer, data.piece_bytes, log)
    report["sources"] = [
        {"name": s.name, "identity": s.identity} | _sizes(m) for s, m in zip(sources, manifests, strict=True)
    ]
    hashes = {m.name: hashlib.sha256(m.read_bytes()).hexdigest() for m in manifests}
    content = json.dumps([FORMAT, data.piece_bytes, [hashes[m.name] for m in manifests]])
    stores = {p.name: TokenStore(p).sha256 for p in _store_paths(entry, len(sources))}
    summary = {
        "content_hash": hashlib.sha256(content.encode()).hexdigest(),
        "fingerprint": tokenizer.fingerprint,
        "manifests": hashes,
        "stores": stores,
        "report": report,
    }
    (entry / "summary.json").write_text(json.dumps(summary, indent=1))


def _walk(source: Source, manifest: Path, piece_bytes: int) -> Iterator[tuple[int, str, bytes, bool]]:
    """Every piece of a source: (document's line in the manifest, side of the split, bytes, is_last)."""
    lines = enumerate(split.records(manifest))
    unknown: split.Record = {"name": None, "split": "train", "sha256": None}
    for document in source.documents():
        record: split.Record | None = None
        number, offset, digest = -1, 0, hashlib.sha256()
        for piece, is_last in cut(document.chunks(), piece_bytes):
            if record is None:
                number, record = next(lines, (-1, unknown))
            digest.update(piece)
            side: str = record["split"]
            if side == "cut":
                side = "train" if offset < record["cut"] else "validation"
            yield number, side, piece, is_last
            offset += len(piece)
        if record and (record["name"], record["sha256"]) != (document.name, digest.hexdigest()):
            raise UserError(f"{source.name}: {document.name} changed while it was being read; start again")
    if missing := next(lines, None):
        raise UserError(f"{source.name}: {missing[1]['name']} vanished while it was being read; start again")


def _training_text(source: Source, manifest: Path, piece_bytes: int) -> Iterator[str]:
    for _, side, piece, _ in _walk(source, manifest, piece_bytes):
        if side == "train":
            yield piece.decode()


def _encode(source: Source, manifest: Path, stem: Path, tokenizer: Tokenizer, piece_bytes: int, log: Log) -> None:
    """Write both stores of a source: each piece as its start, its ids, and end of text after a document."""
    start, end = np.array([tokenizer.start_id], np.int32), np.array([tokenizer.end_id], np.int32)
    waiting: list[tuple[int, str, bytes, bool]] = []
    size = said = 0
    with (
        Writer(stem.with_suffix(".train"), tokenizer.vocab_size, tokenizer.fingerprint) as train,
        Writer(stem.with_suffix(".validation"), tokenizer.vocab_size, tokenizer.fingerprint) as validation,
    ):

        def flush() -> None:
            ids = tokenizer.encode_batch([piece.decode() for _, _, piece, _ in waiting])
            for (number, side, piece, is_last), ids_T in zip(waiting, ids, strict=True):
                whole = np.concatenate([start, ids_T, end] if is_last else [start, ids_T])
                (train if side == "train" else validation).add(whole, len(piece), number, is_last)
            waiting.clear()

        held = 0
        for item in _walk(source, manifest, piece_bytes):
            waiting.append(item)
            size += len(item[2])
            held += len(item[2])
            if held >= _BATCH_BYTES:
                flush()
                held = 0
            if size - said >= 1 << 26:
                said = size
                log(f"{source.name}: encoded {size / 1e6:.0f} MB")
        flush()


def _sizes(manifest: Path) -> dict[str, dict[str, int]]:
    """Documents and bytes on each side; a document that is cut counts on both."""
    sizes = {side: {"documents": 0, "bytes": 0} for side in ("train", "validation")}
    for record in split.records(manifest):
        parts = {record["split"]: record["bytes"]}
        if record["split"] == "cut":
            parts = {"train": record["cut"], "validation": record["bytes"] - record["cut"]}
        for side, size in parts.items():
            sizes[side]["documents"] += 1
            sizes[side]["bytes"] += size
    return sizes


def _store_paths(entry: Path, sources: int) -> list[Path]:
    return [entry / f"source_{i}.{side}" for side in ("train", "validation") for i in range(sources)]


def _open(entry: Path, config: TokenizerConfig) -> Prepared:
    """Open a cache entry, checking that its parts are whole and belong together."""
    try:
        summary = json.loads((entry / "summary.json").read_text())
        for name, wanted in summary["manifests"].items():
            if hashlib.sha256((entry / name).read_bytes()).hexdigest() != wanted:
                raise UserError(f"{entry / name}: changed since it was written; delete {entry} to rebuild it")
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{entry}: damaged ({error}); delete it to rebuild it") from None
    tokenizer = load(config, entry)
    if tokenizer.fingerprint != summary["fingerprint"]:
        raise UserError(f"{entry}: its tokenizer is not the one it was written with; delete it to rebuild it")
    stores = []
    for path in _store_paths(entry, len(summary["manifests"])):
        store = TokenStore(path, tokenizer.vocab_size, tokenizer.fingerprint)
        if store.sha256 != summary["stores"][path.name]:
            raise UserError(f"{path}: is not the store that belongs here; delete {entry} to rebuild it")
        stores.append(store)
    half = len(stores) // 2
    return Prepared(tokenizer, stores[:half], stores[half:], summary["report"], summary["content_hash"], entry)


def _mine() -> str:
    return f"preparing-{socket.gethostname()}-{os.getpid()}-"


def _clean(cache: Path) -> None:
    """Remove what killed processes of this machine left behind."""
    host = f"preparing-{socket.gethostname()}-"
    for path in cache.glob(host + "*"):
        pid = path.name[len(host) :].split("-")[0]
        if pid.isdigit() and not _alive(int(pid)):
            shutil.rmtree(path, ignore_errors=True)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
