"""The learning rate of every update, against a reference in plain Python, at all its edges."""

import itertools
import math

import jax
import pytest

from transformer.training.schedule import Constant, Cosine, Linear, WarmupStableDecay, learning_rate

KINDS = [
    Constant(),
    Cosine(),
    Cosine(final=0.0),
    Cosine(final=1.0),
    Linear(),
    Linear(final=0.25),
    WarmupStableDecay(),
    WarmupStableDecay(decay=1.0, final=0.5),
    WarmupStableDecay(decay=0.01),
]
EDGES = [(0, 1), (1, 1), (0, 2), (1, 2), (2, 2), (4, 10), (0, 10), (9, 10), (10, 10), (3, 100)]


def reference(kind, peak: float, warmup: int, steps: int, update: int) -> float:
    if update < warmup:
        return peak * (update + 1) / warmup
    if isinstance(kind, Constant):
        return peak
    if isinstance(kind, WarmupStableDecay):
        length = max(steps * kind.decay, 1)
        way = max(0.0, (update - steps * (1 - kind.decay)) / length)
    else:
        way = (update - warmup) / max(steps - warmup, 1)
    way = min(way, 1.0)
    if isinstance(kind, Cosine):
        return peak * (kind.final + (1 - kind.final) * (1 + math.cos(math.pi * way)) / 2)
    return peak * (1 + (kind.final - 1) * way)


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize(("warmup", "steps"), EDGES)
def test_every_kind_at_every_edge(kind, warmup, steps):
    """O05: a warm-up of none or of all steps, a single step: a finite rate for every update, and past the end."""
    for update in range(steps + 3):
        found = float(learning_rate(kind, 0.5, warmup, steps, update))
        assert found == pytest.approx(reference(kind, 0.5, warmup, steps, update), abs=2e-7)
        assert math.isfinite(found) and 0 <= found <= 0.5


def test_the_first_update_is_not_lost():
    """O04: a warm-up of 4 gives 0.25, 0.5, 0.75, 1.0 of the peak, and the next is the peak again."""
    rates = [float(learning_rate(Linear(), 1.0, 4, 10, update)) for update in range(10)]
    assert rates[:5] == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])
    assert rates[5:] == pytest.approx([5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6])


@pytest.mark.parametrize(("kind", "warmup"), list(itertools.product(KINDS, (0, 3))), ids=str)
def test_no_update_within_the_steps_has_a_rate_of_zero(kind, warmup):
    """O04, at the other end: also the last update moves."""
    assert all(float(learning_rate(kind, 1.0, warmup, 10, update)) > 1e-3 for update in range(10))


def test_stable_then_decay_keeps_the_peak_until_it_decays():
    rates = [float(learning_rate(WarmupStableDecay(decay=0.2), 1.0, 2, 20, update)) for update in range(20)]
    assert rates == pytest.approx([0.5] + [1.0] * 16 + [0.75, 0.5, 0.25])


def test_a_traced_update_gives_the_same():
    run = jax.jit(lambda update: learning_rate(Cosine(), 1.0, 3, 10, update))
    for update in range(10):
        assert float(run(update)) == pytest.approx(float(learning_rate(Cosine(), 1.0, 3, 10, update)), abs=1e-7)
