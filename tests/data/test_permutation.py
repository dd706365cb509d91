"""The Feistel permutation: a bijection of any size, well mixed, the same for ever."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transformer.data.permutation import permute


@settings(max_examples=60, deadline=None)
@given(size=st.integers(1, 5000), seed=st.integers(-(2**70), 2**70), epoch=st.integers(0, 2**40))
def test_every_index_comes_up_once(size: int, seed: int, epoch: int) -> None:
    assert sorted(permute(np.arange(size), size, seed, epoch).tolist()) == list(range(size))


@pytest.mark.parametrize("size", [1, 2, 3, 255, 256, 257, 65536, 65537, 200_000])
def test_sizes_at_the_edges(size: int) -> None:
    np.testing.assert_array_equal(np.sort(permute(np.arange(size), size, 1, 2)), np.arange(size))


def test_the_order_never_changes() -> None:
    """Stored runs rely on these very values."""
    assert permute(np.arange(10), 10, 7, 0).tolist() == [9, 4, 7, 6, 2, 0, 3, 5, 8, 1]
    assert permute(np.array([[0], [10**12]]), 10**12 + 1, 7, 3).tolist() == [[807636484988], [847135300051]]


def test_each_index_goes_everywhere_alike() -> None:
    """Chi-square of item i -> place over 800 epochs, size 8: about 49 expected for 49 degrees of freedom."""
    counts = np.zeros((8, 8))
    pairs = np.zeros((8, 8))
    for epoch in range(800):
        order = permute(np.arange(8), 8, 0, epoch)
        counts[np.arange(8), order] += 1
        pairs[order[0], order[1]] += 1
    assert ((counts - 100) ** 2 / 100).sum() < 90
    off = pairs[~np.eye(8, dtype=bool)]
    assert ((off - 800 / 56) ** 2 / (800 / 56)).sum() < 100 and np.trace(pairs) == 0


def test_seeds_and_epochs_give_unrelated_orders() -> None:
    orders = [permute(np.arange(1000), 1000, s, e) for s in (0, 1) for e in (0, 1)]
    for i, first in enumerate(orders):
        assert np.abs(np.diff(first)).mean() > 250, "neighbours end up far apart"
        for second in orders[:i]:
            assert (first == second).sum() < 10
            assert abs(np.corrcoef(first, second)[0, 1]) < 0.15
