"""The loss: sums and counts, divided once; and the terms that are added to what is differentiated."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from tests import small
from transformer.analysis.evaluate import Score, total
from transformer.data.packing import Packing
from transformer.data.store import TokenStore, Writer
from transformer.parallel.mesh import Mesh
from transformer.parallel.rules import put
from transformer.training import loss
from transformer.training.loss import Sums, token_sums


def sums(logits, targets, weights=None, **terms) -> Sums:
    logits = jnp.asarray(logits, jnp.float32)
    targets = jnp.asarray(targets, jnp.int32)
    weights = jnp.ones(targets.shape) if weights is None else jnp.asarray(weights, jnp.float32)
    return jax.tree.map(float, token_sums(logits, targets, weights, **terms))


def costing(nats: float, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Logits over two tokens and targets whose loss is ``nats`` each."""
    logits = np.zeros((1, count, 2), np.float32)
    logits[..., 1] = math.log(math.exp(nats) - 1)
    return logits, np.zeros((1, count), np.int32)


def certain(tokens) -> np.ndarray:
    return 50.0 * np.eye(24, dtype=np.float32)[np.asarray(tokens)]


def numpy_sums(logits, targets, weights, z_loss, smoothing) -> list[float]:
    """The definitions, in float64, token by token."""
    found = [0.0, 0.0, 0.0, 0.0]
    for x, target, w in zip(
        np.asarray(logits, np.float64).reshape(-1, logits.shape[-1]), targets.ravel(), weights.ravel(), strict=True
    ):
        if w == 0:
            continue
        log_total = math.log(np.exp(x - x.max()).sum()) + x.max()
        log_p = x - log_total
        wanted = np.full(len(x), smoothing / len(x))
        wanted[target] += 1 - smoothing
        found[0] += w * (-(wanted * log_p).sum() + z_loss * log_total**2)
        found[1] += w * -log_p[target]
        found[2] += w * (x.argmax() == target)
        found[3] += w
    return found


@pytest.mark.smoke
@pytest.mark.parametrize("z_loss", [0.0, 0.01])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_sums_are_those_of_the_definitions(z_loss, smoothing):
    random = np.random.default_rng(0)
    logits = 5 * random.standard_normal((3, 7, 11)).astype(np.float32)
    targets = random.integers(0, 11, (3, 7)).astype(np.int32)
    targets[0] = logits[0].argmax(-1)
    weights = random.integers(0, 3, (3, 7)).astype(np.float32)
    found = sums(logits, targets, weights, z_loss=z_loss, label_smoothing=smoothing)
    np.testing.assert_allclose(found[:4], numpy_sums(logits, targets, weights, z_loss, smoothing), rtol=1e-5)


def test_parts_with_unequal_token_counts_are_added_and_divided_once():
    """L01: 10 tokens of 2 nats and 100 of 5 make 4.727, and not the mean of the means, 3.5."""
    parts = [sums(*costing(2.0, 10)), sums(*costing(5.0, 100))]
    whole = jax.tree.map(lambda *x: sum(x), *parts)
    assert whole.loss / whole.tokens == pytest.approx(4.727, abs=1e-3)
    assert whole.objective == whole.loss


def test_devices_with_unequal_token_counts_are_added_and_divided_once():
    """L02: the same on a mesh of data 2 x tensor 2, where each half of the rows lies on its own devices."""
    logits = np.zeros((2, 100, 2), np.float32)
    logits[0, :, 1], logits[1, :, 1] = (math.log(math.exp(nats) - 1) for nats in (2.0, 5.0))
    weights = np.ones((2, 100), np.float32)
    weights[0, 10:] = 0
    targets = np.zeros((2, 100), np.int32)
    with small.on(Mesh(data=2, tensor=2)):

        @small.jit
        def run(logits, targets, weights):
            return token_sums(
                put(logits, "batch", "time", "vocab"), put(targets, "batch", "time"), put(weights, "batch", "time")
            )

        found = run(logits, targets, weights)
    assert float(found.tokens) == 110
    assert float(found.loss / found.tokens) == pytest.approx(4.727, abs=1e-3)


def test_the_evaluation_adds_and_divides_once():
    """L07: documents of 10 and 100 tokens, of losses 2 and 5, give 4.727 in whatever groups they come."""
    scores = [Score(20.0, 10, 40, 3)] + [Score(5.0 * n, n, 4 * n, 0) for n in (30, 70)]
    assert total(scores).report()["loss"] == pytest.approx(4.727, abs=1e-3)
    assert total([total(scores[:2]), scores[2]]) == total(scores)


@pytest.fixture
def ten_tokens(tmp_path):
    """The one row of a text of the tokens 0 to 9."""
    with Writer(tmp_path / "t", 24, "test") as writer:
        writer.add(range(10), 10, 0, True)
    return Packing(TokenStore(tmp_path / "t"), 9, 0).rows([0], 0)


def test_the_packing_alone_shifts(ten_tokens):
    """L03: certain of the next token, the loss is about 0; 10 tokens have 9 targets."""
    found = sums(certain(ten_tokens.tokens_BT + 1), ten_tokens.targets_BT, ten_tokens.weights_BT)
    assert found.loss == pytest.approx(0, abs=1e-6)
    assert found.tokens == found.correct == 9


def test_copying_the_input_costs(ten_tokens):
    """L04: certain of the current token, the loss is 50 nats each."""
    found = sums(certain(ten_tokens.tokens_BT), ten_tokens.targets_BT, ten_tokens.weights_BT)
    assert found.loss / found.tokens == pytest.approx(50)
    assert found.correct == 0


def test_a_batch_without_targets_is_zero_of_zero():
    """L05: no not-a-number from nothing, in the value or in the gradient."""
    logits, targets = costing(2.0, 4)
    assert sums(logits, targets, np.zeros((1, 4)), z_loss=0.1, label_smoothing=0.1)[:4] == (0, 0, 0, 0)
    gradient = jax.grad(lambda x: token_sums(x, jnp.asarray(targets), jnp.zeros((1, 4))).objective)(jnp.asarray(logits))
    assert not np.asarray(gradient).any()


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_a_target_without_weight_adds_nothing_whatever_it_holds(bad):
    """What lies in padding cannot reach the sums."""
    logits, targets = costing(2.0, 4)
    logits[0, 2:] = bad
    found = sums(logits, targets, [[1, 1, 0, 0]], z_loss=0.1, label_smoothing=0.1)
    assert found.loss == pytest.approx(4.0, rel=1e-6) and found.tokens == 2 and math.isfinite(found.objective)


def test_the_reported_loss_is_without_the_added_terms():
    """L08: four logits of 10 and a z weight of 0.01: objective 1.386 + 1.296, loss 1.386, perplexity 4."""
    found = sums(np.full((1, 1, 4), 10.0), [[2]], z_loss=0.01)
    assert found.objective == pytest.approx(1.386 + 1.296, abs=1e-3)
    assert found.loss == pytest.approx(1.386, abs=1e-3)
    assert Score(found.loss, 1, 1, 0).report()["perplexity"] == pytest.approx(4.0, rel=1e-5)


def test_perplexity_is_the_exponential_of_the_mean():
    """L09: token losses of 0 and 2 have the perplexity 2.718, not the mean of the exponentials, 4.195."""
    assert Score(0.0 + 2.0, 2, 8, 1).report()["perplexity"] == pytest.approx(math.e)


def test_large_logits_are_finite():
    """Float32 ends at an exponent of 88: the largest logit is taken off first."""
    found = sums([[[1e4, 0.0, -1e4]]], [[2]])
    assert found.loss == pytest.approx(2e4)


def test_a_cut_vocabulary_is_never_gathered():
    """On 8 parts of the vocabulary: the same sums and gradients, and no program step that gathers."""
    random = np.random.default_rng(0)
    logits = random.standard_normal((2, 6, 32)).astype(np.float32)
    targets, weights = random.integers(0, 32, (2, 6)).astype(np.int32), np.ones((2, 6), np.float32)

    def run(logits, targets, weights):
        logits, targets = put(logits, "batch", "time", "vocab"), put(targets, "batch", "time")
        grad = jax.grad(lambda x: token_sums(x, targets, weights, z_loss=0.1, label_smoothing=0.1)[0])
        return token_sums(logits, targets, weights, z_loss=0.1, label_smoothing=0.1), grad(logits)

    alone = small.jit(run)(logits, targets, weights)
    with small.on(Mesh(tensor=8)):
        cut = small.jit(run)(jax.device_put(logits, PartitionSpec(None, None, "tensor")), targets, weights)
        assert cut[1].sharding.spec[-1] == "tensor"
        # `correct` needs the place of the largest logit; the losses and their gradients are looked at without it
        losses = small.jit(lambda *x: (run(*x)[0][:2], run(*x)[1]))
        program = (
            losses.lower(jax.device_put(logits, PartitionSpec(None, None, "tensor")), targets, weights)
            .compile()
            .as_text()
        )
    assert small.farthest(cut, alone) < 1e-5
    assert "all-reduce" in program and "all-gather" not in program and "all-to-all" not in program


@pytest.mark.parametrize(("rows", "count"), [(1, 8), (6, 4), (9, 4), (12, 2), (1000, 1)])
def test_sums_in_parts_are_those_of_all_logits(rows, count, monkeypatch):
    """Values and gradients, with both penalties, for parts that divide the positions and parts that do not."""
    random = np.random.default_rng(0)
    x, table = random.normal(size=(3, 8, 5)).astype(np.float32), random.normal(size=(11, 5)).astype(np.float32)
    targets, weights = (
        jnp.asarray(random.integers(0, 11, (3, 8)), jnp.int32),
        random.integers(0, 2, (3, 8)).astype(np.float32),
    )
    monkeypatch.setattr(loss, "NUMBERS", rows * 11)
    assert loss._parts(3, 8, 11) == count
    kinds = loss.Penalties(z_loss=0.01, label_smoothing=0.1)

    def in_parts(x, table):
        found = loss.sums_in_parts(kinds, x, table, targets, weights)
        return 3 * found.objective, found

    def at_once(x, table):
        logits = jnp.einsum("BTD,VD->BTV", x, table)
        found = token_sums(logits, targets, weights, z_loss=0.01, label_smoothing=0.1)
        return 3 * found.objective, found

    for f in (jax.grad, lambda f, *a, **k: lambda *xs: (f(*xs)[1], f(*xs)[1])):
        found, wanted = (f(g, (0, 1), has_aux=True)(x, table) for g in (in_parts, at_once))
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-5)


def test_the_logits_of_a_whole_batch_are_never_there(monkeypatch):
    """Memory of the loss and its gradient: eight times the tokens need no eight times the logits."""

    def temporaries(tokens):
        x, table = jax.ShapeDtypeStruct((1, tokens, 8), jnp.float32), jax.ShapeDtypeStruct((4096, 8), jnp.float32)
        ids, weights = jax.ShapeDtypeStruct((1, tokens), jnp.int32), jax.ShapeDtypeStruct((1, tokens), jnp.float32)

        def objective(x, table, ids, weights):
            return loss.sums_in_parts(loss.Penalties(), x, table, ids, weights).objective

        compiled = jax.jit(jax.grad(objective, (0, 1))).lower(x, table, ids, weights).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    monkeypatch.setattr(loss, "NUMBERS", 1024 * 4096)
    one = temporaries(1024)
    assert one >= 1024 * 4096 * 4 and temporaries(8 * 1024) < 1.5 * one
