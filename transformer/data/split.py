"""Which text is held out, decided document by document before anything else, and written down.

Documents are held out up to the wanted share of the bytes, in the order of their hashes, those that would
exceed it passed over; where every one would, the smallest is held out, and said. So the choice depends on
the content alone: never on a seed, an order, or a file's name. Identical documents land on the same side,
also when they come from different sources. The manifest has one JSON line per
document: name, sha256, bytes, split ("train", "validation" or "cut"); a document that is cut, the only
one of its source, has ``cut`` too: the byte where its held-out end starts.
"""

import hashlib
import json
from array import array
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from transformer.data.corpora import Source
from transformer.data.pieces import cut
from transformer.errors import UserError

Record = dict[str, Any]
_Keys = npt.NDArray[np.uint64]  # the first 8 bytes of each document's sha256


def write_manifests(
    sources: Sequence[Source],
    paths: Sequence[Path],
    validation: float,
    piece_bytes: int,
    log: Callable[[str], None],
) -> None:
    """Read every source once and write its manifest. Raises UserError where a source cannot be split."""
    drafts = [path.with_name(path.name + ".draft") for path in paths]
    keys = [_scan(source, draft, log) for source, draft in zip(sources, drafts, strict=True)]
    chosen = [_choose(s, k, d, validation, log) for s, k, d in zip(sources, keys, drafts, strict=True)]
    held_out = np.unique(np.concatenate(chosen))
    for i, (source, draft, path) in enumerate(zip(sources, drafts, paths, strict=True)):
        single = chosen[i].size == 0
        if single:
            for other in (j for j in range(len(sources)) if j != i):
                if np.isin(keys[i], keys[other]).any():
                    raise UserError(
                        f"data.source: the one document of {source.name} is also in {sources[other].name}, "
                        "so it cannot be held out in part: leave one of them out"
                    )
        training = 0
        with open(path, "w", encoding="utf-8") as stream:
            for record, is_held in zip(records(draft), np.isin(keys[i], held_out), strict=True):
                if single:
                    record |= {"split": "cut", "cut": _cut_at(source, record, validation, piece_bytes)}
                else:
                    record["split"] = "validation" if is_held else "train"
                training += record["split"] != "validation"
                stream.write(json.dumps(record) + "\n")
        draft.unlink()
        if not training:
            raise UserError(f"data.source: no document of {source.name} is left to train on")


def records(path: Path) -> Iterator[Record]:
    """The lines of a manifest."""
    with open(path, encoding="utf-8") as stream:
        for line in stream:
            yield json.loads(line)


def _scan(source: Source, draft: Path, log: Callable[[str], None]) -> _Keys:
    """Hash and measure every document into ``draft``; empty ones are left out."""
    keys, total, said = array("Q"), 0, 0
    with open(draft, "w", encoding="utf-8") as stream:
        for document in source.documents():
            digest, size = hashlib.sha256(), 0
            for chunk in document.chunks():
                digest.update(chunk)
                size += len(chunk)
            if not size:
                continue
            keys.append(int.from_bytes(digest.digest()[:8], "big"))
            record = {"name": document.name, "sha256": digest.hexdigest(), "bytes": size}
            stream.write(json.dumps(record) + "\n")
            total += size
            if total - said >= 1 << 28:
                said = total
                log(f"{source.name}: read {total / 1e6:.0f} MB")
    if not keys:
        raise UserError(f"{source.name}: holds no text")
    log(f"{source.name}: {len(keys)} documents, {total / 1e6:.1f} MB")
    return np.array(keys, np.uint64)


def _choose(source: Source, keys: _Keys, draft: Path, validation: float, log: Callable[[str], None]) -> _Keys:
    """The keys of the held-out documents; none where the source has a single one, which is cut instead."""
    if source.held_out is not None:
        named = [r["name"] in source.held_out for r in records(draft)]
        assert sum(named) == len(source.held_out), "the corpus lacks works that are to be held out"
        return keys[named]
    if keys.size == 1:
        return keys[:0]
    sizes = np.fromiter((r["bytes"] for r in records(draft)), np.int64, keys.size)
    # Sorted hashes are a random order that every reader of the same text agrees on.
    distinct, which = np.unique(keys, return_inverse=True)
    if distinct.size == 1:
        raise UserError(f"data.source: all {keys.size} documents of {source.name} are the same: none can be held out")
    with_copies = np.bincount(which, weights=sizes)
    left, held = validation * sizes.sum(), []
    for i, size in enumerate(with_copies):
        if size <= left:
            held.append(i)
            left -= size
    if not held:
        held = [int(with_copies.argmin())]
        share = with_copies[held[0]] / sizes.sum()
        log(
            f"{source.name}: every document is more than data.validation={validation} of the bytes; "
            f"the smallest, {share:.0%}, is held out"
        )
    return distinct[held]


def _cut_at(source: Source, record: Record, validation: float, piece_bytes: int) -> int:
    """The start of the first piece in the last ``validation`` share of the bytes."""
    document = next(d for d in source.documents() if d.name == record["name"])
    starts, offset = [], 0
    for piece, _ in cut(document.chunks(), piece_bytes):
        starts.append(offset)
        offset += len(piece)
    if len(starts) < 2:
        raise UserError(
            f"{source.name}: its one document has {offset} bytes, no more than one piece, so no part "
            f"can be held out: use more text or a data.piece_bytes below {min(piece_bytes, offset)}"
        )
    return next((s for s in starts[1:] if s >= offset * (1 - validation)), starts[-1])
