"""The model against the oracle: every logit of packed rows, for all kinds of model."""

from typing import Any

import jax
import numpy as np
import pytest

from tests import small
from tests.model import oracle
from tests.model.variants import model_name, pairwise, random, settings
from transformer.analysis.cost import count_parameters
from transformer.model.attention import Attention
from transformer.model.differential import Differential
from transformer.model.grouped import Grouped
from transformer.model.layers import declared_leaves
from transformer.model.linear import Linear as LinearAttention
from transformer.model.mlp import Geglu
from transformer.model.positions import Linear, Rotary
from transformer.model.spans import Global, Pattern, Sliding
from transformer.parallel.rules import RULES
from transformer.training.state import declarations, init_params

PAIRWISE = pairwise()
# Where what heads mixed is normed, a mix of next to nothing, as of a first token whose query and key are orthogonal, is
# blown up, and its rounding too.
TOLERANCE: dict[type, float] = {Differential: 1e-4, LinearAttention: 3e-4}
RANDOM = random(600, seed=1)  # of millions


def compare(variant: dict[str, Any], seed: int) -> None:
    e = small.experiment(**variant)
    params, rows = small.weights(e, seed), small.batch(e, seed, rows=3)
    assert (rows.segments_BT == 0).any() and (rows.segments_BT == 2).any()
    real = rows.segments_BT > 0

    def exact(params: Any) -> np.ndarray:
        each = zip(rows.tokens_BT, rows.segments_BT, strict=True)
        return np.stack([oracle.row_logits(e.model, params, *row) for row in each])[real]

    found, wanted = np.asarray(small.compiled_logits(e, params, rows)), exact(params)
    assert np.isfinite(found).all()
    tolerance = TOLERANCE.get(type(e.model.attention.projection), 1e-5)
    if (
        small.far(found[real], wanted) >= tolerance
    ):  # some few models of many magnify rounding: what of the weights' own?
        rng = np.random.default_rng(seed)
        nearby = jax.tree.map(lambda w: w * (1 + 2.0**-24 * rng.standard_normal(w.shape)), params)
        tolerance = min(1e-4, 3 * small.far(exact(nearby), wanted))
    assert small.far(found[real], wanted) < tolerance


# Every second of the pairwise grid is computed with every change, and all of it in `make exhaustive`.
SOME = [pytest.param(v, marks=pytest.mark.exhaustive if i % 2 else ()) for i, v in enumerate(PAIRWISE)]


@pytest.mark.parametrize("variant", SOME, ids=[model_name(v) for v in PAIRWISE])
def test_logits_are_the_oracles(variant):
    compare(settings(variant), seed=PAIRWISE.index(variant))


@pytest.mark.exhaustive
@pytest.mark.parametrize("variant", RANDOM, ids=model_name)
def test_logits_are_the_oracles_for_kinds_at_random(variant):
    compare(settings(variant), seed=1000 + RANDOM.index(variant))


@pytest.mark.smoke
def test_logits_of_one_model_are_the_oracles():
    projection = Attention(projection=Grouped(kv_heads=2))
    compare({"attention": projection, "positions": Rotary(), "bias": True, "head_width": 6, "depth": 3}, seed=7)


@pytest.mark.parametrize("bias, model", [("none", True), ("all", False)])
def test_attention_may_have_biases_where_the_rest_has_none_and_the_other_way_round(bias, model):
    compare({"attention": Attention(bias=bias, gate=True), "bias": model}, seed=9)


OWN_SPEED, NO_TURNS = Pattern(local=Sliding(window=3), local_base=9.0), Pattern(local=Global(), rotate_global=False)


@pytest.mark.parametrize("stack, span", [("unroll", OWN_SPEED), ("scan", OWN_SPEED), ("scan", NO_TURNS)])
def test_blocks_of_a_pattern_may_turn_at_a_speed_of_their_own_or_not_at_all(stack, span):
    model = {"attention": Attention(span=span), "positions": Rotary(base=50.0, scaling=Linear()), "depth": 3}
    compare(model | {"stack": stack, "mlp": Geglu(exact=True)}, seed=8)


@pytest.mark.parametrize("variant", PAIRWISE[::5], ids=model_name)
def test_every_weight_is_declared_once(variant):
    check_declarations(settings(variant))


@pytest.mark.exhaustive
@pytest.mark.parametrize("variant", RANDOM, ids=model_name)
def test_every_weight_of_kinds_at_random_is_declared_once(variant):
    check_declarations(settings(variant))


def check_declarations(variant: dict[str, Any]) -> None:
    e = small.experiment(**variant)
    declared = declared_leaves(declarations(e))
    flat = jax.tree_util.tree_flatten_with_path(jax.eval_shape(lambda: init_params(e)))[0]
    built = {"/".join(str(k.key) for k in path): leaf for path, leaf in flat}
    assert declared.keys() == built.keys()
    assert len(flat) == len(built)
    assert count_parameters(e)["total"] == sum(leaf.size for leaf in built.values())
    for path, w in declared.items():
        assert w.shape == built[path].shape, path
        assert built[path].dtype == np.float32, path
        assert len(w.axes) == len(w.shape) and set(w.axes) <= set(RULES), path
        assert w.stacked == path.startswith("blocks/") == (w.axes[0] == "block"), path
        assert (w.inputs > 0) == (w.role in ("matrix", "residual")), path
