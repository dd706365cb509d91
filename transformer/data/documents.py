"""Whole documents as ids, for measuring: pieces of a store put together again, or a text just encoded."""

import functools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from transformer.data.pieces import cut
from transformer.data.store import TokenStore
from transformer.data.tokenizer import Tokenizer

Ids = npt.NDArray[np.int32]


class Documents:
    """``documents[i]`` is the start token and then document i's text, without its end; read when asked for.

    ``lengths[i]`` is how many tokens of text that is and ``sources[i]`` how many bytes its source has, known without
    reading them; ``bytes`` is how long the sources are together.
    """

    def __init__(self, stores: Sequence[TokenStore], start_id: int):
        self._stores, self._start_id = stores, start_id
        self._places: list[tuple[int, int, int]] = []  # store, first piece, piece after the last
        self.lengths: list[int] = []
        self.sources: list[int] = []
        for number, store in enumerate(stores):
            starts = np.flatnonzero(np.diff(store.document_P, prepend=-1))
            for first, after in zip(starts.tolist(), [*starts[1:].tolist(), store.pieces], strict=True):
                self._places.append((number, first, after))
                special = after - first + int(store.is_last_P[first:after].sum())
                self.lengths.append(int(store.count_P[first:after].sum()) - special)
                self.sources.append(int(store.source_bytes_P[first:after].sum()))
        self.bytes = sum(self.sources)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Ids:
        return self._read(index)

    @functools.lru_cache(maxsize=4)  # noqa: B019 (as long as the run anyway; windows of a document come in a row)
    def _read(self, index: int) -> Ids:
        number, first, after = self._places[index]
        store = self._stores[number]
        parts = [np.array([self._start_id], np.int32)]
        for piece in range(first, after):
            ids = store.piece(piece)[1:]
            parts.append(ids[:-1] if store.is_last_P[piece] else ids)
        return np.concatenate(parts)


def token_sizes(tokenizer: Tokenizer) -> npt.NDArray[np.int64]:
    """How many bytes of text each id stands for, [V]; 0 for the end of text."""
    return np.array([len(tokenizer.token_bytes(i)) for i in range(tokenizer.vocab_size)], np.int64)


def encode(tokenizer: Tokenizer, text: bytes, piece_bytes: int) -> Ids:
    """``text`` as a document's ids, cut and encoded in pieces as training text is."""
    pieces = [text.decode()] if tokenizer.whole else [part.decode() for part, _ in cut([text], piece_bytes)]
    return np.concatenate([np.array([tokenizer.start_id], np.int32), *tokenizer.encode_batch(pieces)])


class Encoded:
    """Documents that were just encoded, in the form of ``Documents``."""

    def __init__(self, documents: Sequence[Ids], size: int = 0):
        self._documents, self.bytes = documents, size
        self.lengths = [len(ids) - 1 for ids in documents]

    def __len__(self) -> int:
        return len(self._documents)

    def __getitem__(self, index: int) -> Ids:
        return self._documents[index]
