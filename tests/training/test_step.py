"""The training step: accumulation, skipped steps, and the losses of ten steps as they were."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import small
from tests.model.variants import RICH
from transformer.parallel.mesh import Mesh
from transformer.training.optimizer import Muon
from transformer.training.state import init_state, key
from transformer.training.step import sum_gradients, train_step

GOLDEN = Path(__file__).with_name("golden_losses.json")


def step(e):
    """A compiled step of one experiment: (state, batch) -> (state, metrics, summed gradients)."""

    def run(state, rows):
        state, rows = jax.tree.map(jnp.asarray, (state, rows))
        new, metrics = train_step(e, state, rows)
        return new, metrics, sum_gradients(e, state, rows)[1]

    return small.jit(run)


def unequal(e, seed=0):
    """A batch whose rows have very unlike numbers of targets: row r has r of them, at most 7."""
    rows = small.batch(e, seed, padding=0)
    weights = (np.arange(e.model.context) < np.arange(len(rows.tokens_BT))[:, None]) * rows.weights_BT
    return rows._replace(weights_BT=weights.astype(np.float32))


def test_accumulation_is_one_batch():
    """L01, L05, O06: four parts of unequal token counts, one of them empty: gradients, losses and rates of one batch.

    The rate is that of the update: eight updates in four parts each see the warm-up of two and the decay of eight.
    """
    whole, parts = (small.experiment(depth=1, train={"accumulate": a, "steps": 8}) for a in (1, 4))
    runs = [step(whole), step(parts)]
    states = [small.state(whole), small.state(parts)]
    for update in range(8):
        rows = unequal(whole, update)
        weights = rows.weights_BT.copy()
        weights[[0, 4]] = 0  # rows 0 and 4 make up the first part
        rows = rows._replace(weights_BT=weights)
        (one, m1, g1), (four, m4, g4) = (run(state, rows) for run, state in zip(runs, states, strict=True))
        states = [one, four]
        if update == 0:
            assert small.farthest(g4, g1) < 1e-5
        np.testing.assert_allclose(jax.tree.leaves(m4), jax.tree.leaves(m1), rtol=1e-5)
        assert float(m4.learning_rate) == float(m1.learning_rate)
        assert int(four.step) == update + 1 and int(four.skipped) == 0
    assert int(states[1].opt_state[0].count) == 8


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_step_that_is_not_finite_is_skipped_whole(accumulate):
    """Weights and moments stay bit for bit, the step moves on, the skip is counted; the next good batch trains.

    L05: so is a batch without a single target.
    """
    e = small.experiment(depth=1, dtype="bfloat16", train={"accumulate": accumulate})
    run, good = step(e), small.batch(e)
    begun = run(small.state(e), good)[0]  # moments that are not zero
    assert int(begun.skipped) == 0

    infinite, nothing, absurd = good.weights_BT.copy(), np.zeros_like(good.weights_BT), good.weights_BT.copy()
    infinite[3, 1], absurd[3, 1] = np.inf, np.nan
    outside = good.tokens_BT.copy()
    outside[0, 0] = e.vocab_size
    bad = {
        "an infinite weight of a target": (begun, good._replace(weights_BT=infinite)),
        "a weight that is not a number": (begun, good._replace(weights_BT=absurd)),
        "no target at all": (begun, good._replace(weights_BT=nothing)),
        "a token outside the vocabulary": (begun, good._replace(tokens_BT=outside)),
    }
    for value in (np.inf, np.nan):
        broken = jax.tree.map(np.array, begun.params)
        broken["blocks"]["mlp"]["up"]["w"][0, 0, 0] = value
        bad[f"a weight of {value}"] = (begun._replace(params=broken), good)
    for what, (before, rows) in bad.items():
        after, metrics, _ = run(before, rows)
        small.assert_same((after.params, after.opt_state), (before.params, before.opt_state))
        assert int(after.step) == 2 and int(after.skipped) == int(metrics.skipped) == 1, what
    after, metrics, _ = run(begun._replace(skipped=jnp.int32(5)), good)
    assert int(after.skipped) == 5 and np.isfinite(metrics.loss)
    for old, new in zip(jax.tree.leaves(begun.params), jax.tree.leaves(after.params), strict=True):
        assert not np.array_equal(old, new)


def test_a_gradient_alone_can_be_what_is_not_finite():
    """The loss is finite and so is each gradient, but their norm is not: the step is skipped all the same."""
    e = small.experiment(depth=1)
    rows = small.batch(e)
    rows = rows._replace(weights_BT=rows.weights_BT * np.float32(1e30))
    state = small.state(e)
    state.params["unembedding"] *= np.float32(1e-12)
    state.params["final_norm"]["scale"] *= np.float32(1e-3)
    run = step(e)
    assert int(run(state, rows)[0].skipped) == 0
    state.params["final_norm"]["scale"] *= np.float32(1e25)
    after, metrics, gradients = run(state, rows._replace(weights_BT=np.sign(rows.weights_BT)))
    assert np.isfinite(metrics.loss) and not np.isfinite(metrics.grad_norm)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(gradients))
    assert int(after.skipped) == 1
    small.assert_same(after.params, state.params)


def test_a_loss_alone_can_be_what_is_not_finite():
    """The sum of losses overflows where the gradients do not: skipped as well."""
    e = small.experiment(depth=1)
    rows, state = small.batch(e), small.state(e)
    rows = rows._replace(weights_BT=rows.weights_BT * np.float32(3e38 / rows.weights_BT.sum()))
    after, metrics, _ = step(e)(state, rows)
    assert np.isinf(metrics.loss) and np.isfinite(metrics.grad_norm)
    assert int(after.skipped) == 1
    small.assert_same(after.params, state.params)


def test_what_is_measured():
    """Loss and accuracy per target token, tokens, rate and the norm of the mean gradient before clipping."""
    e = small.experiment(depth=1, train={"clip": 1e-3})
    rows, state = unequal(e), small.state(e)
    after, metrics, gradients = step(e)(state, rows)
    logits = np.asarray(small.compiled_logits(e, state.params, rows), np.float64)
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    counted = rows.weights_BT > 0
    losses = -np.take_along_axis(log_p, rows.targets_BT[..., None], -1)[..., 0]
    assert float(metrics.tokens) == counted.sum()
    assert float(metrics.loss) == pytest.approx(losses[counted].mean(), rel=1e-5)
    assert float(metrics.accuracy) == pytest.approx((logits.argmax(-1) == rows.targets_BT)[counted].mean())
    assert float(metrics.learning_rate) == pytest.approx(0.005)
    norm = np.sqrt(sum(np.square(np.asarray(g, np.float64)).sum() for g in jax.tree.leaves(gradients))) / counted.sum()
    assert float(metrics.grad_norm) == pytest.approx(norm, rel=1e-5)
    # after one step Adam's first moment is a tenth of the gradient it was given
    given = jax.tree.map(lambda m: np.asarray(m) / 0.1, after.opt_state[0].mu)
    length = np.sqrt(sum(np.square(g).sum() for g in jax.tree.leaves(given)))
    assert length == pytest.approx(1e-3, rel=1e-4)


def test_no_clip_and_a_large_clip_leave_the_gradient_alone():
    none, large = (small.experiment(depth=1, train={"clip": c}) for c in (None, 1e6))
    rows = small.batch(none)
    first, second = (step(e)(small.state(e), rows)[0] for e in (none, large))
    assert small.farthest(first.opt_state[0].mu, second.opt_state[0].mu) < 1e-6


def test_keys_differ_by_seed_name_and_step_and_are_derived():
    drawn = {
        jax.random.bits(key(seed, name, at)).item()
        for seed in (0, 1)
        for name in ("params", "dropout", "sample")
        for at in (0, 1)
    }
    assert len(drawn) == 12
    assert jax.random.bits(key(0, "params")) == jax.random.bits(key(0, "params", 0))


def golden_experiments():
    """Two models that between them use most of the library."""
    plain = small.experiment(vocab=32, depth=2, width=16, heads=4, train={"batch": 4, "learning_rate": 2e-2})
    rich = small.experiment(
        vocab=32,
        attention=RICH[0],
        positions=RICH[1],
        bias=True,
        dropout=0.1,
        stack="scan",
        tie_embeddings=True,
        train={"batch": 4, "accumulate": 2, "optimizer": Muon(), "z_loss": 1e-3, "label_smoothing": 0.05, "seed": 3},
    )
    return {"adamw, unrolled": plain, "muon, grouped, rotary, scanned, dropout, tied": rich}


def ten_losses(e) -> list[float]:
    with small.on(Mesh()):
        state = small.jit(init_state, static_argnums=0)(e)
        run = small.jit(train_step, static_argnums=0)
        losses = []
        for update in range(10):
            state, metrics = run(e, state, small.place_batch(small.batch(e, update)))
            losses.append(float(metrics.loss))
    return losses


@pytest.mark.smoke
@pytest.mark.parametrize("name", golden_experiments())
def test_ten_steps_are_as_they_were(name):
    """Initial weights, model, loss, gradients, schedule and optimizer at once, on every supported version.

    When this fails, runs from before and after the change cannot be compared with one another. If that is
    meant, say so where users read of changes, and write the file anew with
    ``python -m tests.training.test_step``. If it is not, do not: something else has changed.
    """
    wanted = json.loads(GOLDEN.read_text())["losses"][name]
    assert ten_losses(golden_experiments()[name]) == pytest.approx(wanted, rel=1e-5)


if __name__ == "__main__":
    about = (
        "Training losses of ten steps of two tiny models (tests/training/test_step.py). They change when initial "
        "weights, model, loss, optimizer or schedule do: then older runs no longer compare with newer ones. "
        "Anew: python -m tests.training.test_step"
    )
    found = {name: ten_losses(e) for name, e in golden_experiments().items()}
    GOLDEN.write_text(json.dumps({"about": about, "losses": found}, indent=1) + "\n")
