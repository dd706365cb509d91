"""The batch of step n, as a pure function of (seed, n): no state, so resuming is asking for the next n.

Global row g = step * batch + i. The mixture says which source gives it and the how-manieth row of that
source it is; dividing by the source's rows per epoch gives the epoch and the row within it. Processes
take rows of the same global batch, so their number changes nothing.
"""

import hashlib
import queue
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from transformer.data.mixture import Mixture
from transformer.data.packing import Batch, Int64, Packing
from transformer.data.store import TokenStore

__all__ = ["Batch", "Loader", "batch_hash"]


class Loader:
    """Batches of ``batch`` rows of ``context`` positions from one or several stores.

    ``weights`` are the stores' shares of rows; empty means in proportion to their source bytes, which are
    the same for every tokenizer. ``shares`` has what they came to.
    """

    def __init__(self, stores: Sequence[TokenStore], weights: Sequence[float], seed: int, batch: int, context: int):
        """Raises UserError when a store is shorter than one row, or a share is too small."""
        assert stores and batch >= 1 and context >= 1
        assert len(weights) in (0, len(stores)) and all(w > 0 for w in weights)
        self.batch, self.context, self.seed = batch, context, seed
        self.packings = [Packing(store, context, seed) for store in stores]
        self._mixture = Mixture(weights or [store.source_bytes for store in stores])
        self.shares = self._mixture.shares

    def batch_at(self, step: int, rows: Sequence[int] | Int64 | None = None) -> Batch:
        """The global batch of ``step`` (0, 1, ...), or those of its ``rows``: arrays [B, context]."""
        wanted_B = np.arange(self.batch) if rows is None else np.asarray(rows, np.int64)
        assert step >= 0 and wanted_B.size and wanted_B.min() >= 0 and wanted_B.max() < self.batch, (step, rows)
        global_B = step * self.batch + wanted_B
        source_B, nth_B = self._mixture.at(global_B)
        rows_B = np.array([p.rows_per_epoch for p in self.packings])[source_B]
        epoch_B, row_B = nth_B // rows_B, nth_B % rows_B
        shape = (wanted_B.size, self.context)
        dtypes = [np.int32] * 4 + [np.float32]
        out = Batch(*(np.zeros(shape, dtype) for dtype in dtypes))  # type: ignore[arg-type]
        groups = np.unique(np.stack([source_B, epoch_B], axis=1), axis=0)
        for source, epoch in groups.tolist():
            chosen = np.flatnonzero((source_B == source) & (epoch_B == epoch))
            part = self.packings[source].rows(row_B[chosen], epoch)
            for whole, found in zip(out, part, strict=True):
                whole[chosen] = found
        return out

    def accounting(self) -> list[dict[str, Any]]:
        """``Packing.accounting`` of each source, with its share of the rows."""
        return [p.accounting() | {"share": s} for p, s in zip(self.packings, self.shares, strict=True)]

    def iterate(self, start_step: int, rows: Int64 | None = None) -> "Batches":
        """Batches (or ``rows`` of them) from ``start_step`` on, without end, made ahead by a thread; close it."""
        return Batches(self, start_step, rows)


class Batches(Iterator[Batch]):
    """An endless iterator with one thread that works two batches ahead.

    An exception in the thread is raised at the next ``next``. Use it in ``with``, or call ``close``.
    """

    def __init__(self, loader: Loader, step: int, rows: Int64 | None):
        self._ready: queue.Queue[Batch | BaseException] = queue.Queue(maxsize=2)
        self._closed = threading.Event()
        self._work = (loader, step, rows)
        self._thread = threading.Thread(target=self._run, name="batches", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        loader, step, rows = self._work
        while not self._closed.is_set():
            item: Batch | BaseException
            try:
                item = loader.batch_at(step, rows)
            except BaseException as error:
                item = error
            while not self._closed.is_set():
                try:
                    self._ready.put(item, timeout=0.1)
                    break
                except queue.Full:
                    continue
            if isinstance(item, BaseException):
                return
            step += 1

    def __next__(self) -> Batch:
        if self._closed.is_set():
            raise StopIteration
        item = self._ready.get()
        if isinstance(item, BaseException):
            self.close()
            raise item
        return item

    def close(self) -> None:
        """Stop the thread and wait for it. Closing twice is fine."""
        self._closed.set()
        self._thread.join()

    def __enter__(self) -> "Batches":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def batch_hash(batch: Batch) -> str:
    """sha256 of the arrays (values, types and shapes), to compare runs."""
    digest = hashlib.sha256()
    for array in batch:
        digest.update(f"{array.dtype.str}{array.shape}".encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()
