"""The mixture of experts: what it degenerates to, its gradients, its balance, and that nothing is dropped."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import small
from tests.model import oracle
from transformer import config
from transformer.errors import UserError
from transformer.model import grouping, moe
from transformer.model.layers import Weight
from transformer.model.mlp import Swiglu
from transformer.model.moe import Moe
from transformer.model.positions import Rotary
from transformer.settings import override
from transformer.training.optimizer import newton_schulz, orthogonal
from transformer.training.step import sum_gradients, train_step

TYPICAL = Moe(experts=5, top_k=2, shared=1, width=8)


def test_one_expert_is_the_dense_mlp():
    """Its weight is 1. Loss and all gradients of what both have; the router's is zero."""
    kind = Moe(experts=1, top_k=1, scores="sigmoid", balance=0.0, z_loss=0.0)
    one = small.experiment(mlp=kind, depth=1, bias=True, positions=Rotary())
    dense = dataclasses.replace(one, model=dataclasses.replace(one.model, mlp=Swiglu()))

    def as_dense(params):
        own = params["blocks"]["mlp"]
        mlp = {name: {"w": own[name][:, 0], "b": own[f"{name}_b"][:, 0]} for name in ("gate", "up", "down")}
        return params | {"blocks": params["blocks"] | {"mlp": mlp}}

    state, rows, run = small.state(one), small.batch(one), small.jit(sum_gradients, static_argnums=0)
    sums, slopes = run(one, state, rows)
    wanted, wanted_slopes = run(dense, state._replace(params=as_dense(state.params)), rows)
    np.testing.assert_allclose(sums.loss, wanted.loss, rtol=1e-6)
    assert small.farthest(as_dense(slopes), wanted_slopes) < 1e-5
    assert np.abs(slopes["blocks"]["mlp"]["router"]["w"]).max() < 1e-5 * np.abs(slopes["blocks"]["mlp"]["up"]).max()


def test_experts_in_another_order_are_the_same_model():
    e = small.experiment(mlp=TYPICAL, depth=1, bias=True)
    params, rows = small.weights(e), small.batch(e)
    other, order = jax.tree.map(np.array, params), [3, 1, 4, 0, 2]
    mlp = other["blocks"]["mlp"]
    for name in ("gate", "up", "down", "gate_b", "up_b", "down_b"):
        mlp[name] = mlp[name][:, order]
    mlp["router"] = {"w": mlp["router"]["w"][..., order], "b": mlp["router"]["b"][..., order]}
    assert small.far(small.compiled_logits(e, other, rows), small.compiled_logits(e, params, rows)) < 1e-6


@pytest.mark.parametrize("counts", [[3, 0, 9, 5], [0, 0, 0, 0], [0, 17, 0, 3], [20, 0, 0, 0], [1, 1, 1, 2]])
def test_products_by_blocks_are_the_ragged_product(counts, monkeypatch):
    """Also where blocks of four rows end within a matrix's share, and where rows are left over; with gradients."""
    monkeypatch.setattr(grouping, "ROWS", 4)
    random = np.random.default_rng(sum(counts))
    used_M1 = (np.arange(20) < sum(counts))[:, None]
    x_MI = jnp.asarray(random.standard_normal((20, 3)) * used_M1, jnp.float32)
    w_EIO = jnp.asarray(random.standard_normal((4, 3, 5)), jnp.float32)
    slope_MO = jnp.asarray(random.standard_normal((20, 5)), jnp.float32)
    ends = np.cumsum(counts)

    def one_by_one(x_MI, w_EIO):
        parts = [x_MI[end - n : end] @ w_EIO[e] for e, (n, end) in enumerate(zip(counts, ends, strict=True))]
        return jnp.concatenate([*parts, jnp.zeros((20 - ends[-1], 5))])

    found, back = jax.vjp(lambda x, w: grouping.by_blocks(x, w, jnp.asarray(counts)), x_MI, w_EIO)
    wanted, wanted_back = jax.vjp(one_by_one, x_MI, w_EIO)
    assert small.far(found * used_M1, wanted * used_M1) < 1e-6
    for a, b in zip(back(slope_MO), wanted_back(slope_MO), strict=True):
        assert small.far(a, b) < 1e-6
    ragged = jax.lax.ragged_dot(x_MI, w_EIO, jnp.asarray(counts))
    assert small.far(ragged * used_M1, wanted * used_M1) < 1e-6


@pytest.mark.parametrize(("first", "here"), [(0, 5), (0, 2), (2, 1), (3, 2)])
def test_results_and_gradients_are_those_of_all_experts_masked(first, here):
    """A device with ``here`` of five experts: every token through each of its own, those not chosen times zero."""
    R, D, F, C, E = 24, 6, 4, 3, 5
    random = np.random.default_rng(first + here)

    def draw(*shape):
        return jnp.asarray(random.standard_normal(shape), jnp.float32)

    chosen_BTC = jnp.asarray(np.stack([random.permutation(E)[:C] for _ in range(R)]).reshape(2, -1, C))
    experts = {"gate": draw(here, D, F), "up": draw(here, D, F), "down": draw(here, F, D), "up_b": draw(here, F)}
    given = draw(2, R // 2, D), draw(2, R // 2, C), experts
    slope_BTD = draw(2, R // 2, D)

    def sorted_(x_BTD, weights_BTC, experts):
        return moe.own_experts(x_BTD, weights_BTC, chosen_BTC, experts, first)

    def masked(x_BTD, weights_BTC, experts):
        total_BTD = jnp.zeros_like(x_BTD)
        for i in range(here):
            h_BTF = jax.nn.silu(x_BTD @ experts["gate"][i]) * (
                x_BTD @ experts["up"][i] + experts["up_b"][i][None, None]
            )
            share_BT = (weights_BTC * (chosen_BTC == first + i)).sum(-1)
            total_BTD += share_BT[..., None] * (h_BTF @ experts["down"][i])
        return total_BTD

    found, back = jax.vjp(sorted_, *given)
    wanted, wanted_back = jax.vjp(masked, *given)
    assert small.far(found, wanted) < 1e-5
    assert small.farthest(back(slope_BTD), wanted_back(slope_BTD)) < 1e-5


@pytest.mark.parametrize("kind", [TYPICAL, Moe(experts=4, top_k=3, scores="sigmoid")], ids=["softmax", "sigmoid"])
def test_the_balance_is_the_oracles_and_what_does_not_count_is_left_out(kind):
    random = np.random.default_rng(1)
    logits_BTE = random.standard_normal((3, 6, kind.experts)).astype(np.float32)
    counted_BT = (random.random((3, 6)) < 0.6).astype(np.float32)
    counted_BT[2] = 0  # a row in which nothing counts
    kept = [[list(map(float, logits_BTE[b, t])) for t in range(6) if counted_BT[b, t]] for b in range(3)]
    logits_BTE[counted_BT == 0] = np.nan
    scores, _, _, hits = moe.route(kind, jnp.asarray(logits_BTE))
    found = moe.routing(jnp.asarray(logits_BTE), scores, hits, jnp.asarray(counted_BT))
    uneven, squares, counts = oracle.balance(kind, [row for row in kept if row])
    np.testing.assert_allclose(found.uneven, uneven, rtol=1e-5)
    np.testing.assert_allclose(found.z, squares, rtol=1e-5)
    np.testing.assert_array_equal(found.chosen_E, counts)


def test_the_balance_is_one_where_loads_are_even_and_larger_where_they_are_not():
    kind, ones = Moe(experts=4, top_k=1, normalise=False), jnp.ones((1, 4))

    def measured(logits_TE):
        logits_BTE = jnp.asarray(logits_TE, jnp.float32)[None]
        scores, _, _, hits = moe.route(kind, logits_BTE)
        return float(moe.routing(logits_BTE, scores, hits, ones).uneven) / 4

    assert measured(5 * np.eye(4)) == pytest.approx(1)
    assert measured(50 * np.eye(4)[[0] * 4]) == pytest.approx(4)
    assert 1 < measured(5 * np.eye(4)[[0, 0, 1, 2]]) < 4


def test_nothing_is_dropped_where_all_go_to_one_expert():
    """The oracle has no capacity either, and the record shows all choices."""
    e = small.experiment(mlp=Moe(experts=4, top_k=1, normalise=False, width=8), depth=1, bias=True)
    state, rows = small.state(e), small.batch(e)
    state.params["blocks"]["mlp"]["router"]["b"][:] = [0, 0, 50, 0]
    found = np.asarray(small.compiled_logits(e, state.params, rows))
    for b in range(3):
        wanted = oracle.row_logits(e.model, state.params, rows.tokens_BT[b], rows.segments_BT[b])
        real = rows.segments_BT[b] > 0
        assert small.far(found[b, real], wanted[real]) < 1e-5
    _, metrics = small.jit(train_step, static_argnums=0)(e, state, rows)
    assert float(metrics.busiest) == 4
    assert float(metrics.balance) == pytest.approx(4, rel=1e-5)


@pytest.mark.exhaustive
def test_parts_of_a_batch_scanned_and_computed_again_are_the_same_objective():
    """Rows of unlike numbers of targets in two parts, the first of them with a row of none. The penalties are in the
    objective as they were asked for, and nowhere else."""
    model = {"mlp": Moe(experts=5, top_k=2, shared=1, width=8, balance=0.5, z_loss=0.3)}
    whole = small.experiment(**model)
    parts = small.experiment(**model, stack="scan", remat="full", train={"accumulate": 2})
    rows, state = small.batch(whole), small.state(whole)
    weights = rows.weights_BT * (np.arange(8) < np.arange(8)[:, None])
    rows = rows._replace(weights_BT=weights.astype(np.float32))
    run = small.jit(sum_gradients, static_argnums=0)
    (one, slopes), (two, slopes2) = (run(e, state, rows) for e in (whole, parts))
    assert small.farthest(slopes2, slopes) < 1e-5
    for a, b in zip(jax.tree.leaves(two), jax.tree.leaves(one), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)
    added = 0.5 * one.routing.uneven.sum() + 0.3 * one.routing.z.sum()
    np.testing.assert_allclose(one.objective, one.loss + added, rtol=1e-5)
    assert (one.routing.chosen_E.sum(-1) == 2 * one.tokens).all() and one.routing.chosen_E.shape == (2, 5)


def test_the_penalties_reach_the_router():
    """With weights of the experts that give nothing, its gradient is that of the penalties alone: by differences."""
    kind = Moe(experts=3, top_k=2, width=4, balance=2.0, z_loss=0.5)
    e = small.experiment(mlp=kind, depth=1, train={"batch": 2})
    state, rows = jax.tree.map(jnp.asarray, (small.state(e), small.batch(e)))
    state.params["blocks"]["mlp"]["down"] = 0 * state.params["blocks"]["mlp"]["down"]
    run = small.jit(sum_gradients, static_argnums=0)
    slope_DE = run(e, state, rows)[1]["blocks"]["mlp"]["router"]["w"][0]
    direction_DE = slope_DE / jnp.linalg.norm(slope_DE)

    def objective(step):
        params = jax.tree.map(lambda x: x, state.params)
        params["blocks"]["mlp"]["router"]["w"] += step * direction_DE[None]
        return float(run(e, state._replace(params=params), rows)[0].objective)

    assert float(jnp.linalg.norm(slope_DE)) > 0.1
    assert (objective(1e-3) - objective(-1e-3)) / 2e-3 == pytest.approx(float(jnp.linalg.norm(slope_DE)), rel=0.02)


def test_bfloat16_is_near_and_the_router_stays_float32():
    e = small.experiment(mlp=TYPICAL, depth=1)
    low = override(e, {"model.dtype": "bfloat16"})
    params, rows = small.weights(e), small.batch(e)
    found, wanted = (np.asarray(small.compiled_logits(x, params, rows)) for x in (low, e))
    # A choice may be another where two scores are nearly equal; then a token is far off, and only that.
    errors = np.abs(found - wanted).max(-1) / np.abs(wanted).max()
    assert np.median(errors) < 0.01 and (errors < 0.05).mean() > 0.9
    text = str(jax.make_jaxpr(lambda p: small.logits(low, p, rows))(params))
    products = [line for line in text.splitlines() if "dot_general" in line and "f32[" in line.split("=")[0]]
    assert any(":f32[64,5]" in line for line in products), "8 rows of 8 tokens by 5 experts"


def test_each_experts_matrix_is_made_orthogonal_by_itself():
    w = Weight(shape=(2, 3, 4, 6), axes=("block", "expert", "width", "mlp"), role="matrix", inputs=1, stacked=True)
    momentum = jnp.asarray(np.random.default_rng(0).standard_normal(w.shape), jnp.float32)
    found = orthogonal(w, momentum, 0.2)
    for block in range(2):
        for expert in range(3):
            wanted = newton_schulz(momentum[block, expert]) * 0.2 * 6**0.5
            assert small.far(found[block, expert], wanted) < 1e-5


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model.mlp.top_k": 9}, "config.model.mlp.top_k: 9 is not between 1 and the 8 experts"),
        ({"model.mlp.top_k": 0}, "config.model.mlp.top_k"),
        ({"model.mlp.experts": 0}, "config.model.mlp.experts: 0 is too small"),
        ({"model.mlp.shared": -1}, "config.model.mlp.shared"),
        ({"model.mlp.width": 0}, "config.model.mlp.width"),
        ({"model.mlp.top_k": 1}, "config.model.mlp.normalise"),
        ({"model.mlp.balance": -1.0}, "config.model.mlp.balance"),
        ({"model.mlp.top_k": 8, "model.mlp.balance": 0.5}, "config.model.mlp.balance: 0.5 has no effect here"),
        ({"model.mlp.top_k": 8, "model.mlp.normalise": False}, "config.model.mlp.normalise: False has no effect here"),
        ({"mesh.expert": 3, "train.batch": 9}, "expert of 8 does not divide over mesh.expert=3"),
        ({"mesh.expert": 8, "train.batch": 4}, "config.train.batch=4"),
        ({"model.mlp": "swiglu", "mesh.expert": 2}, "config.mesh.expert: 2, and the model has no experts to cut"),
    ],
)
def test_what_makes_no_mixture_is_refused(changes, words):
    e = override(small.experiment(), {"model.mlp": "moe"} | changes)
    with pytest.raises(UserError) as error:
        config.check(e, given=changes)
    assert words in str(error.value)
