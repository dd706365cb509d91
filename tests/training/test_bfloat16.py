"""Computing in bfloat16 trains as float32 does."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import small
from transformer.training.optimizer import Adamw, Muon
from transformer.training.state import fresh_state
from transformer.training.step import train_step

STEPS, ROWS = 120, 16


def curve(dtype: str, optimizer: Adamw | Muon) -> np.ndarray:
    """Losses on text with something to learn: each token follows from the two before it, but for one in eight."""
    train = {"steps": STEPS, "batch": ROWS, "learning_rate": 1e-2, "optimizer": optimizer, "warmup": 10}
    e = small.experiment(depth=2, width=32, heads=4, context=32, dtype=dtype, train=train)
    random = np.random.default_rng(0)
    state = fresh_state(e)
    step = jax.jit(train_step, static_argnums=0, donate_argnums=1)
    losses = []
    for _ in range(STEPS):
        rows = random.integers(0, small.VOCAB, (ROWS, 33))
        for t in range(2, 33):
            follows = (rows[:, t - 1] + 2 * rows[:, t - 2]) % 8
            rows[:, t] = np.where(random.random(ROWS) < 0.125, rows[:, t], follows)
        batch = small.pack(rows.astype(np.int32), np.ones_like(rows, np.int32))
        state, metrics = step(e, state, batch)
        losses.append(float(metrics.loss))
    assert all(w.dtype == jnp.float32 for w in jax.tree.leaves(state.params))
    return np.array(losses)


@pytest.mark.parametrize(
    "optimizer", [pytest.param(Adamw(), marks=pytest.mark.exhaustive), Muon()], ids=["adamw", "muon"]
)
def test_bfloat16_converges_as_float32_does(optimizer: Adamw | Muon) -> None:
    exact, half = curve("float32", optimizer), curve("bfloat16", optimizer)
    assert exact[-20:].mean() < 0.75 * exact[:5].mean(), "something was learned"
    for part in (slice(40, 80), slice(80, 120)):
        assert half[part].mean() == pytest.approx(exact[part].mean(), rel=0.03)
    assert not np.array_equal(exact, half)
