"""Packing: every token once, nothing mixed, all of it counted."""

import itertools
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from transformer.data.packing import Batch, Packing
from transformer.data.permutation import permute
from transformer.data.store import TokenStore
from transformer.errors import UserError

MakeStore = Callable[..., TokenStore]
RELAXED = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def epoch_of(packing: Packing, epoch: int = 0) -> Batch:
    return packing.rows(np.arange(packing.rows_per_epoch), epoch)


def numbered(lengths: list[int]) -> list[list[int]]:
    """Pieces whose tokens are all different, so each can be recognised."""
    ends = np.cumsum(lengths)
    return [list(range(end - n, end)) for n, end in zip(lengths, ends.tolist(), strict=True)]


@RELAXED
@given(
    lengths=st.lists(st.integers(2, 30), min_size=1, max_size=25),
    context=st.integers(1, 40),
    epoch=st.integers(0, 3),
)
def test_D03_D06_D07_D08_every_token_is_a_target_once(
    make_store: MakeStore, lengths: list[int], context: int, epoch: int
) -> None:
    pieces = numbered(lengths)
    total = sum(lengths)
    if total < context + 1:
        return
    packing = Packing(make_store(pieces, 1000), context, seed=5)
    batch = epoch_of(packing, epoch)
    weights = batch.weights_BT
    assert set(np.unique(weights)) <= {0.0, 1.0}
    starts = {piece[0] for piece in pieces}
    trained = batch.targets_BT[weights == 1].tolist()
    assert sorted(trained) == sorted(set(range(total)) - starts), "each token but the first of its piece"
    real = batch.segments_BT > 0
    follows = batch.tokens_BT[weights == 1] + 1
    np.testing.assert_array_equal(follows, trained, "the target is the token's own successor")
    assert not weights[~real].any(), "padding is not trained on"
    padded_rows = np.unique(np.nonzero(~real)[0])
    assert set(padded_rows.tolist()) <= {packing.rows_per_epoch - 1}, "only the last row is padded"
    counts = packing.accounting()
    assert counts["tokens"] == total == counts["trained"] + counts["starts"] + counts["dropped"]
    assert counts["positions"] == weights.size == counts["trained"] + counts["idle"] + counts["padded"]
    assert (counts["trained"], counts["padded"]) == (int(weights.sum()), int((~real).sum()))
    assert counts["dropped"] == 0


@RELAXED
@given(lengths=st.lists(st.integers(2, 9), min_size=3, max_size=25), context=st.integers(2, 20))
def test_D01_D02_segments_and_positions_agree(make_store: MakeStore, lengths: list[int], context: int) -> None:
    if sum(lengths) < context + 1:
        return
    owner = np.repeat(np.arange(len(lengths)), lengths)
    batch = epoch_of(Packing(make_store(numbered(lengths), 1000), context, seed=1))
    for tokens, segments, positions in zip(batch.tokens_BT, batch.segments_BT, batch.positions_BT, strict=True):
        real = segments > 0
        pieces = owner[tokens[real]]
        changes = np.flatnonzero(np.diff(pieces)) + 1
        np.testing.assert_array_equal(np.flatnonzero(np.diff(segments[real])) + 1, changes)
        assert segments[0] == 1 and set(np.diff(segments[real])) <= {0, 1}
        expected = np.concatenate([np.arange(len(part)) for part in np.split(pieces, changes)])
        np.testing.assert_array_equal(positions[real], expected)
        assert not positions[~real].any() and not segments[~real].any()


def test_rows_are_the_permuted_stream_cut_every_context_tokens(make_store: MakeStore) -> None:
    """The packing against its definition, written out slot by slot."""
    pieces = numbered([3, 9, 2, 5, 14, 2, 7])
    packing = Packing(make_store(pieces, 1000), 4, seed=3)
    for epoch in (0, 1, 5):
        order = permute(np.arange(7), 7, 3, epoch)
        stream = [token for p in order.tolist() for token in pieces[p]]
        batch = epoch_of(packing, epoch)
        windows = [(stream[r * 4 : r * 4 + 5] + [0] * 5)[:5] for r in range(packing.rows_per_epoch)]
        rows = np.concatenate([batch.tokens_BT, batch.targets_BT[:, -1:]], axis=1).tolist()
        assert sorted(rows) == sorted(windows) and rows[-1] == windows[-1], "shuffled rows, the last one in its place"
        assert rows != windows


@RELAXED
@given(
    lengths=st.lists(st.integers(2, 30), min_size=8, max_size=60), context=st.integers(1, 20), seed=st.integers(0, 9)
)
def test_groups_end_at_the_same_text_whatever_the_context(
    make_store: MakeStore, lengths: list[int], context: int, seed: int
) -> None:
    """Rows are shuffled within groups alone: up to a group's end every context has read the same text."""
    if sum(lengths) < context + 1:
        return
    pieces = numbered(lengths)
    store = make_store(pieces, 10_000)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("transformer.data.packing.GROUP_BYTES", store.source_bytes // 4)
        packing = Packing(store, context, seed)
        order, starts, rows_G = packing.order(0)
        groups = round(store.source_bytes / (store.source_bytes // 4))
        assert len(rows_G) == groups + 2 and (np.diff(rows_G) >= 0).all() and rows_G[0] == 0
        stream = [token for p in order.tolist() for token in pieces[p]]
        place = {token: i for i, token in enumerate(stream)}
        batch = epoch_of(packing)
        for first, after in itertools.pairwise(rows_G):
            read = sorted(place[t] for t in batch.tokens_BT[first:after][batch.segments_BT[first:after] > 0].tolist())
            assert read == list(range(first * context, min(after * context, len(stream))))
            if len(read) > 1 and after < packing.rows_per_epoch - 1:  # the group begins where a piece does, to a row
                assert min(abs(int(after) * context - starts)) < context


def test_D07_documents_of_10_to_19_tokens_in_rows_of_7(make_store: MakeStore) -> None:
    pieces = numbered(list(range(10, 20)))
    batch = epoch_of(Packing(make_store(pieces, 1000), 7, seed=0))
    trained = batch.weights_BT > 0
    followed = dict(zip(batch.tokens_BT[trained].tolist(), batch.targets_BT[trained].tolist(), strict=True))
    seen = batch.tokens_BT[batch.segments_BT > 0]
    assert len(set(seen.tolist())) == len(seen) and set(batch.targets_BT[-1].tolist()) | set(seen) >= set(range(145))
    for piece in pieces:
        assert [followed[t] for t in piece[:-1]] == piece[1:], "order within a document is kept"


def test_D04_the_pad_value_never_matters(make_store: MakeStore) -> None:
    """Token 0 is a token like any other; padding is known by its segment."""
    batch = epoch_of(Packing(make_store([[0, 0, 0, 0, 0]] * 3), 4, seed=0))
    assert batch.weights_BT.sum() == 12
    assert (batch.segments_BT == 0).sum() == 4 * 4 - 15


def test_D06_documents_of_700_tokens_in_rows_of_1024_lose_nothing(make_store: MakeStore) -> None:
    counts = Packing(make_store([[1] * 700] * 1000), 1024, seed=0).accounting()
    assert counts["trained"] == 699_000 and counts["dropped"] == 0 and counts["padded"] < 1024


def test_rows_alone_or_together_are_the_same(make_store: MakeStore) -> None:
    packing = Packing(make_store(numbered([2, 3, 50, 4, 4, 4, 31] * 5), 1000), 6, seed=2)
    whole = epoch_of(packing, 1)
    picked = np.array([5, 0, packing.rows_per_epoch - 1, 5])
    for array, part in zip(whole, packing.rows(picked, 1), strict=True):
        np.testing.assert_array_equal(array[picked], part)
        assert array.dtype in (np.int32, np.float32) and array.flags.c_contiguous


def test_D12_epochs_differ_and_an_old_one_can_be_asked_for_again(make_store: MakeStore) -> None:
    packing = Packing(make_store(numbered([5] * 40), 1000), 8, seed=2)
    first = epoch_of(packing, 0)
    others = [epoch_of(packing, e) for e in (1, 2, 3)]
    assert all((first.tokens_BT != other.tokens_BT).mean() > 0.8 for other in others)
    np.testing.assert_array_equal(first.tokens_BT, epoch_of(packing, 0).tokens_BT)


@pytest.mark.parametrize("tokens", [2, 100, 512])
def test_D16_less_than_one_row(make_store: MakeStore, tokens: int) -> None:
    with pytest.raises(UserError, match=f"{tokens} tokens found .* 513 needed"):
        Packing(make_store([[1] * tokens]), 512, seed=0)


def test_D16_exactly_one_row(make_store: MakeStore) -> None:
    packing = Packing(make_store([[1] * 513]), 512, seed=0)
    assert packing.rows_per_epoch == 1 and epoch_of(packing).weights_BT.sum() == 512
