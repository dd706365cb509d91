"""The loader: the batch of a step is a formula, whoever asks and whenever."""

import threading
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from transformer.data.loader import Batch, Loader, batch_hash
from transformer.data.mixture import Mixture
from transformer.data.store import TokenStore
from transformer.errors import UserError

MakeStore = Callable[..., TokenStore]


def pieces(first: int, lengths: list[int]) -> list[list[int]]:
    out = []
    for n in lengths:
        out.append(list(range(first, first + n)))
        first += n
    return out


@pytest.fixture
def loader(make_store: MakeStore) -> Loader:
    return Loader([make_store(pieces(0, [7, 20, 3, 11, 30, 9]), 1000)], (), seed=1, batch=8, context=5)


@pytest.fixture
def mixed(make_store: MakeStore) -> Loader:
    stores = [make_store(pieces(0, [9] * 12), 1000), make_store(pieces(500, [30, 4]), 1000)]
    return Loader(stores, (3.0, 1.0), seed=1, batch=8, context=5)


@pytest.fixture(params=["loader", "mixed"])
def any_loader(request: pytest.FixtureRequest) -> Loader:
    return request.getfixturevalue(request.param)


def joined(parts: list[Batch]) -> Batch:
    return Batch(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))


@pytest.mark.parametrize("readers", [1, 2, 4, 8])
def test_D10_D14_D15_S05_slices_join_to_the_whole_batch(any_loader: Loader, readers: int) -> None:
    size = any_loader.batch // readers
    for step in (0, 1, 2, 3, 50, 10**9):
        parts = [any_loader.batch_at(step, range(r * size, (r + 1) * size)) for r in range(readers)]
        assert batch_hash(joined(parts)) == batch_hash(any_loader.batch_at(step))


def test_D10_D12_D13_resuming_at_any_step_gives_the_same_batches(any_loader: Loader) -> None:
    with any_loader.iterate(0) as batches:
        hashes = [batch_hash(next(batches)) for _ in range(12)]
    assert len(set(hashes)) == 12
    for step in range(12):
        with any_loader.iterate(step) as batches:
            assert [batch_hash(next(batches)) for _ in range(12 - step)] == hashes[step:]


def test_a_new_loader_agrees_and_another_seed_does_not(make_store: MakeStore) -> None:
    stores = [make_store(pieces(0, [9] * 50), 1000)]
    hashes = [batch_hash(Loader(stores, (), seed, 4, 5).batch_at(2)) for seed in (0, 0, 1)]
    assert hashes[0] == hashes[1] != hashes[2]


def test_D12_each_epoch_is_whole_and_in_another_order(loader: Loader) -> None:
    """Batches straddle epochs; each epoch's targets still come up exactly once."""
    rows = loader.packings[0].rows_per_epoch
    steps = joined([loader.batch_at(step) for step in range(-(-rows * 3 // 8))])
    seen = []
    for epoch in range(3):
        part = slice(epoch * rows, (epoch + 1) * rows)
        targets = steps.targets_BT[part][steps.weights_BT[part] == 1].tolist()
        assert len(targets) == len(set(targets)) == 80 - 6
        seen.append(targets)
    assert seen[0] != seen[1] != seen[2]


def test_D16_a_batch_larger_than_an_epoch_goes_through_several(make_store: MakeStore) -> None:
    loader = Loader([make_store(pieces(0, [4, 4, 4]), 100)], (), 0, batch=64, context=5)
    assert loader.packings[0].rows_per_epoch == 3
    assert loader.batch_at(0).weights_BT.sum() == pytest.approx(9 * 64 / 3, abs=5)


def test_D20_weights_count_trained_tokens_apart_from_positions(loader: Loader) -> None:
    (counts,) = loader.accounting()
    rows = loader.packings[0].rows_per_epoch
    weights = joined([loader.batch_at(step) for step in range(rows)]).weights_BT
    assert weights.sum() == 8 * counts["trained"] and weights.size == 8 * counts["positions"]


def test_each_source_goes_through_its_own_epochs(mixed: Loader) -> None:
    rows = joined([mixed.batch_at(step) for step in range(40)])
    second = rows.tokens_BT[:, 0] >= 500
    assert second.sum() == 80 and mixed.shares == (0.75, 0.25)
    per_epoch = [p.rows_per_epoch for p in mixed.packings]
    for source, mask in ((0, ~second), (1, second)):
        targets, weights = rows.targets_BT[mask], rows.weights_BT[mask]
        first_epoch = targets[: per_epoch[source]][weights[: per_epoch[source]] == 1]
        trained = mixed.packings[source].accounting()["trained"]
        assert len(set(first_epoch.tolist())) == first_epoch.size == trained


@settings(max_examples=30, deadline=None)
@given(weights=st.lists(st.floats(0.01, 1), min_size=1, max_size=5))
def test_mixture_counts_have_a_closed_form(weights: list[float]) -> None:
    mixture = Mixture(weights)
    rows = np.arange(2 * mixture.cycle + 100)
    source, nth = mixture.at(rows)
    for i, weight in enumerate(weights):
        assert nth[source == i].tolist() == list(range(int((source == i).sum()))), "no row skipped or repeated"
        assert abs(mixture.shares[i] - weight / sum(weights)) <= 1 / 4096
        running = np.cumsum(source == i) - (rows + 1) * mixture.shares[i]
        assert np.abs(running).max() <= len(weights), "spread evenly, not in blocks"
    far_source, far_nth = mixture.at(rows[:200] + mixture.cycle * 10**9)
    np.testing.assert_array_equal(far_source, source[:200])
    np.testing.assert_array_equal(far_nth - nth[:200], mixture.counts_N[far_source] * 10**9)


def test_without_weights_shares_follow_source_bytes(make_store: MakeStore) -> None:
    loader = Loader([make_store([[1] * 300]), make_store([[1] * 100])], (), 0, 4, 5)
    assert loader.shares == (0.75, 0.25)


def test_a_share_too_small_for_the_cycle() -> None:
    with pytest.raises(UserError, match=r"source 2 of 2 has 1e-05 of the rows"):
        Mixture([1.0, 1e-5])


def test_D16_short_text_names_tokens_found_and_needed(make_store: MakeStore) -> None:
    with pytest.raises(UserError, match=r"100 tokens found .* 513 needed"):
        Loader([make_store([[1] * 100])], (), 0, 8, 512)


def test_the_iterator_passes_errors_on_and_stops_its_thread(loader: Loader, monkeypatch: pytest.MonkeyPatch) -> None:
    before = threading.active_count()
    real = loader.batch_at

    def failing(step: int, *args: int) -> Batch:
        if step == 3:
            raise UserError("the disk is gone")
        return real(step, *args)

    monkeypatch.setattr(loader, "batch_at", failing)
    batches = loader.iterate(0)
    for _ in range(3):
        next(batches)
    with pytest.raises(UserError, match="the disk is gone"):
        next(batches)
    with pytest.raises(StopIteration):
        next(batches)
    batches.close()
    assert threading.active_count() == before


def test_closing_early_or_twice_leaves_no_thread(loader: Loader) -> None:
    before = threading.active_count()
    for _ in range(5):
        with loader.iterate(7) as batches:
            next(batches)
        batches.close()
    assert threading.active_count() == before


def test_hash_sees_values_types_and_shapes(loader: Loader) -> None:
    batch = loader.batch_at(0)
    changed = batch.targets_BT.copy()
    changed[3, 2] += 1
    assert batch_hash(batch) == batch_hash(loader.batch_at(0))
    assert batch_hash(batch) != batch_hash(batch._replace(targets_BT=changed))
    as_bits = batch.weights_BT.view(np.int32)
    assert batch_hash(batch) != batch_hash(batch._replace(weights_BT=as_bits)), "same bytes, another type"
    flat = batch.tokens_BT.reshape(-1)
    assert batch_hash(batch) != batch_hash(batch._replace(tokens_BT=flat)), "same bytes, another shape"


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(step=st.integers(0, 10**7), cut=st.integers(1, 7))
def test_any_slice_at_any_step(any_loader: Loader, step: int, cut: int) -> None:
    parts = joined([any_loader.batch_at(step, range(cut)), any_loader.batch_at(step, range(cut, any_loader.batch))])
    assert batch_hash(parts) == batch_hash(any_loader.batch_at(step))
