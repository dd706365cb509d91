"""AdamW and Muon against Optax and against NumPy; and who decays."""

import json
from pathlib import Path
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests import small
from tests.model.variants import RICH
from transformer.model.layers import Role, Weight, by_declaration, declared_leaves
from transformer.model.mlp import Swiglu
from transformer.training.optimizer import (
    DECAYED,
    MATRICES,
    Adamw,
    Muon,
    decayed,
    make_optimizer,
    newton_schulz,
    orthogonal,
)
from transformer.training.state import declarations, init_state
from transformer.training.step import sum_gradients, train_step

GOLDEN = Path(__file__).with_name("golden_roles.json")


def full(**more):
    """A model with a weight of every role and name."""
    settings = {"attention": RICH[0], "bias": True, "mlp": Swiglu(width=24), "depth": 2} | more
    return small.experiment(**settings)


def gradients(e, count: int):
    return [small.weights(e, seed=100 + i, size=0.1) for i in range(count)]


def applied(transformation, params, grads, rate):
    """Parameters after an update for each gradient, as the training step applies a direction."""
    params = jax.tree.map(jnp.asarray, params)
    state = transformation.init(params)

    @small.jit
    def step(params, state, gradient):
        directions, state = transformation.update(gradient, state, params)
        return jax.tree.map(lambda p, d: p - rate * d, params, directions), state

    for gradient in grads:
        params, state = step(params, state, gradient)
    return params


def test_roles_decay_and_optimizer_of_every_weight():
    """O03: the committed list. A change here changes how models train: look at each line before it is renewed.

    To write the list anew: ``python -m tests.training.test_optimizer``.
    """
    assert roles() == json.loads(GOLDEN.read_text())


def roles() -> dict[str, str]:
    declared = declarations(full())
    found = {}
    for decays, (path, w) in zip(jax.tree.leaves(decayed(declared)), declared_leaves(declared).items(), strict=True):
        dimensions = " ".join(f"{axis}={size}" for axis, size in zip(w.axes, w.shape, strict=True))
        optimizer = "muon" if w.role in MATRICES else "adam"
        found[path] = f"{w.role}, {'decays' if decays else 'keeps its size'}, {optimizer}, {dimensions}"
    return found


def test_every_role_is_decided_on():
    """O03: a role that is new must be put in one of the lists; none is decided by a name or a shape."""
    undecayed = {"position", "bias", "scale"}
    assert set(DECAYED) | undecayed == set(get_args(Role)) and not set(DECAYED) & undecayed
    assert set(MATRICES) <= set(DECAYED)


@pytest.mark.parametrize("kind", [Adamw(), Muon()], ids=["adamw", "muon"])
def test_decay_alone(kind):
    """O01: zero gradients, rate 0.1, decay 0.1: biases, norm scales and positions stay 1.0, the rest becomes 0.99."""
    declared = declarations(full())
    ones = by_declaration(lambda w: np.ones(w.shape, np.float32), declared)
    zeros = jax.tree.map(np.zeros_like, ones)
    after = applied(make_optimizer(kind, 0.1, declared), ones, [zeros], 0.1)

    def check(w, x):
        np.testing.assert_allclose(x, 0.99 if w.role in DECAYED else 1.0, rtol=1e-6)

    by_declaration(check, declared, after)


def test_a_tied_table_is_one_weight_in_one_group():
    """O11: one parameter, one decay, and its gradient is the sum of both uses'."""
    tied, untied = full(tie_embeddings=True), full()
    assert "unembedding" not in declarations(tied)
    assert declarations(tied)["embedding"].role == "embedding"
    params = small.weights(tied)
    twice = params | {"unembedding": params["embedding"]}
    rows = small.batch(tied)
    run = small.jit(sum_gradients, static_argnums=0)
    state = small.state(tied)
    _, one = run(tied, state._replace(params=params), rows)
    _, two = run(untied, state._replace(params=twice), rows)
    assert small.far(one["embedding"], two["embedding"] + two["unembedding"]) < 1e-5
    declared = declarations(tied)
    ones = by_declaration(lambda w: np.ones(w.shape, np.float32), declared)
    after = applied(make_optimizer(Adamw(), 0.1, declared), ones, [jax.tree.map(np.zeros_like, ones)], 0.1)
    np.testing.assert_allclose(after["embedding"], 0.99, rtol=1e-6)


def test_adamw_is_optax_adamw():
    e = full()
    declared, params, grads = declarations(e), small.weights(e), gradients(e, 4)
    kind = Adamw(b1=0.8, b2=0.9, epsilon=1e-3)
    found = applied(make_optimizer(kind, 0.1, declared), params, grads, 0.05)
    theirs = optax.adamw(1.0, b1=0.8, b2=0.9, eps=1e-3, weight_decay=0.1, mask=decayed(declared))
    wanted = applied(optax.chain(theirs, optax.scale(-1.0)), params, grads, 0.05)
    assert small.farthest(found, wanted) < 1e-6


def numpy_adam(p, grads, b1, b2, epsilon, rate, decay):
    p, m, v = p.astype(np.float64), 0.0, 0.0
    for t, g in enumerate(grads, 1):
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * np.square(g, dtype=np.float64)
        p = p - rate * (m / (1 - b1**t) / (np.sqrt(v / (1 - b2**t)) + epsilon) + decay * p)
    return p


def test_adamw_is_the_papers():
    """arXiv:1711.05101, algorithm 2, in float64."""
    e = full()
    declared, params, grads = declarations(e), small.weights(e), gradients(e, 4)
    found = applied(make_optimizer(Adamw(), 0.1, declared), params, grads, 0.05)
    wanted = by_declaration(
        lambda w, p, *g: numpy_adam(p, g, 0.9, 0.95, 1e-8, 0.05, 0.1 * (w.role in DECAYED)), declared, params, *grads
    )
    assert small.farthest(found, wanted) < 1e-5


def numpy_orthogonal(matrix):
    """Five steps of Jordan's polynomial, through singular values: what the products must come to."""
    u, s, vt = np.linalg.svd(matrix.astype(np.float64), full_matrices=False)
    s = s / (np.sqrt((s**2).sum()) + 1e-8)
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return u * s @ vt


def numpy_muon(w, p, grads, kind, rate, decay):
    p, m = p.astype(np.float64), 0.0
    fan_in = int(np.prod(w.shape[1 : 1 + w.inputs]))
    for g in grads:
        m = kind.momentum * m + (1 - kind.momentum) * g
        ahead = kind.momentum * m + (1 - kind.momentum) * g
        turned = []
        for block in ahead:
            matrix = block.reshape(fan_in, -1)
            turned.append((kind.rms * max(matrix.shape) ** 0.5 * numpy_orthogonal(matrix)).reshape(block.shape))
        p = p - rate * (np.stack(turned) + decay * p)
    return p


def test_muon_is_momentum_made_orthogonal_block_by_block():
    """Matrices as the definition has it, each block's and each by inputs x outputs; everything else by AdamW."""
    e = full(depth=2, head_width=6)
    declared, params, grads = declarations(e), small.weights(e), gradients(e, 3)
    kind = Muon(momentum=0.9)
    found = applied(make_optimizer(kind, 0.1, declared), params, grads, 0.05)

    def wanted(w, p, *g):
        if w.role in MATRICES:
            return numpy_muon(w, p, g, kind, 0.05, 0.1)
        return numpy_adam(p, g, 0.9, 0.95, 1e-8, 0.05, 0.1 * (w.role in DECAYED))

    assert small.farthest(found, by_declaration(wanted, declared, params, *grads)) < 1e-4


@pytest.mark.parametrize("shape", [(8, 8), (6, 16), (16, 6)])
def test_muon_is_optax_muon_without_momentum(shape):
    """One step on one matrix, tall, wide and square, with the scaling by root mean square."""
    matrix = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    declared = {"w": Weight(shape=shape, axes=("width", "mlp"), role="matrix", inputs=1)}
    params = {"w": np.zeros(shape, np.float32)}
    found = applied(make_optimizer(Muon(momentum=0.0), 0.0, declared), params, [{"w": matrix}], 1.0)
    theirs = optax.contrib.muon(1.0, beta=0.0, consistent_rms=0.2)
    wanted = applied(optax.chain(theirs, optax.scale(-1.0)), params, [{"w": matrix}], 1.0)
    assert small.farthest(found, wanted) < 1e-4


@pytest.mark.parametrize("shape", [(12, 12), (6, 20), (20, 6)])
def test_newton_schulz_pushes_singular_values_to_one(shape):
    """Those that make up 1% of the norm or more end between 0.6 and 1.3, with the same singular vectors."""
    matrix = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
    turned = np.asarray(newton_schulz(matrix))
    assert turned.shape == shape
    np.testing.assert_allclose(turned, numpy_orthogonal(matrix), atol=1e-4)
    assert ((s := np.linalg.svd(turned)[1]) > 0.6).all() and (s < 1.3).all()
    np.testing.assert_allclose(newton_schulz(1000 * matrix), turned, atol=1e-5)  # its size does not matter
    assert not np.asarray(newton_schulz(np.zeros(shape, np.float32))).any()


def test_an_orthogonal_update_has_the_root_mean_square_asked_for():
    """rms * sqrt(max(fan in, fan out)) on an orthogonal matrix is ``rms`` per entry where it is square."""
    w = Weight(
        shape=(2, 16, 4, 4), axes=("block", "width", "heads", "head_width"), role="matrix", inputs=1, stacked=True
    )
    x = np.random.default_rng(0).standard_normal(w.shape).astype(np.float32)
    turned = np.asarray(orthogonal(w, jnp.asarray(x), 0.2))
    assert turned.shape == w.shape
    assert np.sqrt((turned**2).mean(axis=(1, 2, 3))) == pytest.approx(0.2, rel=0.15)


def test_float32_weights_take_small_updates():
    """O09: from 1.0, a hundred Adam steps of 6e-4 under a constant gradient end at 0.940; bfloat16 would stay at 1."""
    declared = {"s": Weight(shape=(1,), axes=("stream",), role="scale")}
    one = {"s": np.ones(1, np.float32)}
    after = applied(make_optimizer(Adamw(), 0.1, declared), one, [one] * 100, 6e-4)
    assert float(after["s"][0]) == pytest.approx(0.940, abs=1e-4)


@pytest.mark.parametrize("kind", [Adamw(), Muon()], ids=["adamw", "muon"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_all_that_is_kept_is_float32_under_bfloat16(kind, accumulate):
    """O09, O10: weights, moments, gradients and their sums over parts; the compute dtype is of the products alone."""
    e = full(dtype="bfloat16", train={"optimizer": kind, "accumulate": accumulate})
    before = jax.eval_shape(lambda: init_state(e))
    rows = small.batch(e)
    after, metrics = jax.eval_shape(lambda s, b: train_step(e, s, b), before, rows)
    _, grads = jax.eval_shape(lambda s, b: sum_gradients(e, s, b), before, rows)
    for x in jax.tree.leaves((before, after)):
        assert x.dtype == (jnp.float32 if x.shape else jnp.int32)
    assert {x.dtype for x in jax.tree.leaves(grads)} == {jnp.dtype(jnp.float32)}
    assert {x.dtype for x in jax.tree.leaves(metrics._replace(skipped=None))} == {jnp.dtype(jnp.float32)}


def test_gradients_of_many_parts_are_counted_in_float32(monkeypatch):
    """O10: 512 parts of gradient 1 add up to 512, where a sum in bfloat16 would stop at 256."""
    from transformer.training import step
    from transformer.training.loss import Sums

    one = jnp.ones(())
    monkeypatch.setattr(step, "part_gradients", lambda *_: (Sums(one, one, one, one), {"w": one}))
    e = small.experiment(train={"accumulate": 512, "batch": 512}, context=1)
    sums, grads = sum_gradients(e, None, np.zeros((512, 1), np.float32))
    assert float(grads["w"]) == float(sums.tokens) == 512


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps(roles(), indent=1) + "\n")
