"""Pieces to rows: shuffle the pieces, lay them end to end, cut the line every T tokens, shuffle nearby rows.

    stream of one epoch   [piece 7 ......][piece 2 ...............][piece 5 ...
    rows (T + 1 slots)    |--- row 0 ---|
                                      |--- row 1 ---|                  stride T
    tokens = a row's first T slots, targets = its last T

Rows that follow one another come from one piece, which would make a poor batch. So rows are shuffled once
more within *groups* of about GROUP_BYTES of source text. Pieces and groups depend on bytes alone: at the end
of each group every run of the same seed has read the same text, whatever its tokenizer and context.

Segment ids alone say what belongs together: 1, 2, ... by piece within a row, 0 for padding. From them
follow the positions (restarting with each segment) and the weights (1 where a token and its target lie in
the same piece). So each stored token is a target exactly once an epoch, except the first of each piece,
which is the end-of-text token that starts it. Nothing is dropped; only the last row is padded.

Shapes: B rows, T positions, R = T + 1 slots, P pieces, N piece parts inside the wanted rows.
"""

import threading
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from transformer.data.permutation import mix, permute
from transformer.data.store import TokenStore
from transformer.errors import UserError

GROUP_BYTES = 1 << 20

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]


class Batch(NamedTuple):
    """Rows for training. Position t of a row reads tokens_BT[:, t] and is to predict targets_BT[:, t]."""

    tokens_BT: Int32
    targets_BT: Int32
    segments_BT: Int32
    positions_BT: Int32
    weights_BT: npt.NDArray[np.float32]


class Packing:
    """The rows of one store: row r of an epoch is a function of (seed, epoch, r)."""

    def __init__(self, store: TokenStore, context: int, seed: int):
        """Raises UserError when the store has less than one row of ``context`` tokens and their targets."""
        if store.tokens < context + 1:
            raise UserError(
                f"data: {store.tokens} tokens found in {store.path.name}, {context + 1} needed for one row "
                f"(model.context {context}): use more text or a shorter context"
            )
        self.store, self.context, self.seed = store, context, seed
        # The last token of the stream has no target, so S tokens make S - 1 pairs.
        self.rows_per_epoch = -(-(store.tokens - 1) // context)
        self._orders: dict[int, tuple[Int64, Int64, Int64]] = {}
        self._lock = threading.Lock()

    def order(self, epoch: int) -> tuple[Int64, Int64, Int64]:
        """(pieces_P, starts_P, rows_G): pieces in this epoch's order, their first slots, the groups' first rows."""
        with self._lock:
            if epoch not in self._orders:
                pieces = self.store.pieces
                pieces_P = permute(np.arange(pieces), pieces, self.seed, epoch)
                count_P = np.asarray(self.store.count_P)[pieces_P]
                starts_P = np.cumsum(count_P) - count_P
                bytes_P = np.asarray(self.store.source_bytes_P)[pieces_P]
                groups = max(1, round(self.store.source_bytes / GROUP_BYTES))
                group_P = (np.cumsum(bytes_P) - bytes_P) * groups // max(self.store.source_bytes, 1)
                first_G = np.append(starts_P, self.store.tokens)[np.searchsorted(group_P, np.arange(groups))]
                # The last row, which may be padded, stays where it is: a group of its own.
                last = self.rows_per_epoch - 1
                rows_G = np.append(np.minimum(-(-first_G // self.context), last), [last, last + 1])
                # A batch may straddle two epochs; older ones are not needed again.
                recent = sorted(self._orders)[-1:] if self._orders else []
                self._orders = {e: self._orders[e] for e in recent} | {epoch: (pieces_P, starts_P, rows_G)}
            return self._orders[epoch]

    def rows(self, row: npt.ArrayLike, epoch: int) -> Batch:
        """The rows with the numbers ``row`` (int64 [B], each below rows_per_epoch) of one epoch."""
        pieces_P, starts_P, rows_G = self.order(epoch)
        row_B = self._shuffled(np.asarray(row, np.int64), rows_G, epoch)
        total, slots = self.store.tokens, self.context + 1
        low_B = row_B * self.context
        high_B = np.minimum(low_B + slots, total)
        first_B = np.searchsorted(starts_P, low_B, side="right") - 1
        last_B = np.searchsorted(starts_P, high_B, side="left") - 1
        # One entry per part of a piece inside a row.
        parts_B = last_B - first_B + 1
        row_N = np.repeat(np.arange(row_B.size), parts_B)
        nth_N = np.arange(row_N.size) - np.repeat(np.cumsum(parts_B) - parts_B, parts_B)
        rank_N = first_B[row_N] + nth_N
        start_N, piece_N = starts_P[rank_N], pieces_P[rank_N]
        from_N = np.maximum(start_N, low_B[row_N])
        to_N = np.minimum(start_N + self.store.count_P[piece_N], high_B[row_N])
        length_N = to_N - from_N
        # One entry per filled slot; address is where its token lies in the store.
        step = np.arange(int(length_N.sum())) - np.repeat(np.cumsum(length_N) - length_N, length_N)
        address = np.repeat(self.store.offset_P[piece_N] + from_N - start_N, length_N) + step
        place = np.repeat(row_N * slots + from_N - low_B[row_N], length_N) + step
        tokens_BR = np.zeros((row_B.size, slots), np.int32)
        segments_BR = np.zeros((row_B.size, slots), np.int32)
        positions_BR = np.zeros((row_B.size, slots), np.int32)
        tokens_BR.reshape(-1)[place] = self.store.tokens_S[address]
        segments_BR.reshape(-1)[place] = np.repeat(nth_N + 1, length_N)
        positions_BR.reshape(-1)[place] = step
        segments_BT = segments_BR[:, :-1]
        same_BT = (segments_BT == segments_BR[:, 1:]) & (segments_BT > 0)
        return Batch(
            np.ascontiguousarray(tokens_BR[:, :-1]),
            np.ascontiguousarray(tokens_BR[:, 1:]),
            np.ascontiguousarray(segments_BT),
            np.ascontiguousarray(positions_BR[:, :-1]),
            same_BT.astype(np.float32),
        )

    def _shuffled(self, row_B: Int64, rows_G: Int64, epoch: int) -> Int64:
        """The place in the stream of each row, which is another one of its group."""
        group_B = np.searchsorted(rows_G, row_B, side="right") - 1
        shuffled_B = np.empty_like(row_B)
        for group in np.unique(group_B).tolist():
            chosen, first, size = group_B == group, rows_G[group], int(rows_G[group + 1] - rows_G[group])
            shuffled_B[chosen] = first + permute(row_B[chosen] - first, size, mix(self.seed + group), epoch)
        return shuffled_B

    def accounting(self) -> dict[str, int]:
        """Where every token and position of one epoch goes.

        tokens = trained + starts + dropped (starts: first tokens of pieces, which nothing precedes), and
        positions = trained + idle + padded (idle: positions whose next token is another piece's, or none).
        """
        tokens, pieces = self.store.tokens, self.store.pieces
        positions = self.rows_per_epoch * self.context
        trained, padded = tokens - pieces, max(positions - tokens, 0)
        return {
            "tokens": tokens,
            "trained": trained,
            "starts": pieces,
            "dropped": 0,
            "rows": self.rows_per_epoch,
            "positions": positions,
            "idle": positions - trained - padded,
            "padded": padded,
            "source_bytes": self.store.source_bytes,
        }
