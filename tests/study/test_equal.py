"""What is held equal is equal, counted on the built model; and only what may be solved for changes."""

import math
from typing import Any

import jax
import pytest
from hypothesis import given
from hypothesis import settings as fuzz
from hypothesis import strategies as st

from transformer import config
from transformer.analysis.cost import training_flops
from transformer.config import Experiment
from transformer.data.tokenizer import Bpe, Bytes
from transformer.errors import UserError
from transformer.model.attention import Attention
from transformer.model.config import Model
from transformer.model.grouped import Grouped, MultiHead
from transformer.model.mlp import Gelu, Swiglu
from transformer.model.moe import Moe
from transformer.model.positions import Learned, Rotary, Sinusoidal
from transformer.settings import leaves
from transformer.study import equal
from transformer.study.equal import HELD, QUANTITIES
from transformer.training.config import Train
from transformer.training.state import init_params


def bytes_per_row(experiment: Experiment) -> float:
    """As if a token stood for more bytes the larger the vocabulary is."""
    return experiment.model.context * math.log2(experiment.vocab_size) / 4


def counted(experiment: Experiment) -> dict[str, float]:
    """Without the formulas of `analysis.cost`: parameters from the shapes that the model itself declares."""
    shapes = jax.eval_shape(lambda: init_params(experiment))

    def count(tree: Any) -> int:
        return sum(math.prod(x.shape) for x in jax.tree.leaves(tree))

    train = experiment.train
    tokens = train.steps * train.batch * experiment.model.context
    return {
        "steps": train.steps,
        "tokens": tokens,
        "bytes": train.steps * train.batch * bytes_per_row(experiment),
        "parameters": count(shapes),
        "block_parameters": count(shapes["blocks"]),
        "flops": tokens * training_flops(experiment),
    }


@st.composite
def experiments(draw: st.DrawFn) -> Experiment:
    model = Model(
        depth=draw(st.integers(1, 16)),
        width=draw(st.sampled_from([24, 96, 192])),
        heads=draw(st.sampled_from([2, 3, 6])),
        head_width=draw(st.sampled_from([None, None, 16])),
        context=draw(st.sampled_from([32, 64])),
        attention=Attention(projection=draw(st.sampled_from([MultiHead(), Grouped(kv_heads=1)]))),
        positions=draw(st.sampled_from([Learned(), Sinusoidal(), Rotary()])),
        mlp=draw(st.sampled_from([Gelu(), Swiglu(), Gelu(width=100), Moe(), Moe(shared=1, width=50)])),
        bias=draw(st.booleans()),
        tie_embeddings=draw(st.booleans()),
    )
    steps = draw(st.integers(1, 2000))
    train = Train(steps=steps, warmup=draw(st.integers(0, steps)), batch=draw(st.integers(1, 8)))
    return Experiment(model=model, tokenizer=Bpe(vocab_size=draw(st.sampled_from([300, 4096]))), train=train)


@fuzz(max_examples=20, deadline=None)
@given(experiments(), experiments(), st.sampled_from(list(HELD)), st.booleans(), st.booleans())
def test_what_is_held_is_equal_to_one_percent_or_refused(
    base: Experiment, arm: Experiment, held: Any, width_is_fixed: bool, mlp_is_fixed: bool
) -> None:
    """Of two unlike models. Nothing changes but what may; what holds steps or tokens by steps changes no model."""
    fixed = {
        name for name, is_fixed in (("model.width", width_is_fixed), ("model.mlp.width", mlp_is_fixed)) if is_fixed
    }
    quantity, unknown = HELD[held]
    try:
        found = equal.solve(held, arm, equal.quantities(base, bytes_per_row), fixed, bytes_per_row)
    except UserError as error:
        assert "can only be brought to within" in str(error) and quantity in str(error)
        return
    config.check(found)
    before, after = leaves(arm), leaves(found)
    changed = {name for name in after if after[name] != before.get(name)}
    allowed = {None: set(), "steps": {"train.steps", "train.warmup", "train.eval_every"}}
    assert changed <= allowed.get(unknown, {"model.width", "model.mlp.width"}) - fixed
    if unknown is not None:
        assert abs(counted(found)[quantity] / counted(base)[quantity] - 1) <= 0.01
    assert equal.quantities(found, bytes_per_row) == pytest.approx(counted(found))


@pytest.mark.parametrize("held", [held for held, (_, unknown) in HELD.items() if unknown == "width"])
@pytest.mark.parametrize("depth", [1, 2, 3, 6, 12, 16])
def test_every_depth_of_the_depth_study_can_be_made_equal(held: Any, depth: int) -> None:
    """Refusing would be easy: these must not be refused. Width alone is enough where it can be."""
    base = Experiment(model=Model(depth=4, width=128, heads=4), tokenizer=Bpe(vocab_size=2048))
    arm = Experiment(model=Model(depth=depth, width=128, heads=4), tokenizer=Bpe(vocab_size=2048))
    found = equal.solve(held, arm, equal.quantities(base, bytes_per_row), {"model.depth"}, bytes_per_row)
    quantity = HELD[held][0]
    assert abs(counted(found)[quantity] / counted(base)[quantity] - 1) <= 0.01
    assert (found.model.width < 128) == (depth > 4) and (found.model.width > 128) == (depth < 4)
    if found.model.mlp.width is not None:
        alone = Experiment(model=Model(depth=depth, width=found.model.width, heads=4), tokenizer=Bpe(vocab_size=2048))
        assert abs(counted(alone)[quantity] / counted(base)[quantity] - 1) > 0.01, "the MLP was changed without need"


@pytest.mark.parametrize("held", ["parameters", "flops_by_width"])
def test_of_a_mixture_flops_hold_what_a_token_meets_and_parameters_hold_all(held: Any) -> None:
    """Against a dense model, by the shapes of the weights: of eight experts a token meets two."""
    base = Experiment(model=Model(width=96, heads=4, mlp=Swiglu()), tokenizer=Bytes())
    arm = Experiment(model=Model(width=96, heads=4, mlp=Moe(experts=8, top_k=2)), tokenizer=Bytes())
    found = equal.solve(held, arm, equal.quantities(base, bytes_per_row), {"model.mlp.experts"}, bytes_per_row)

    def products(e: Experiment, share: float) -> float:
        mlp = jax.eval_shape(lambda: init_params(e))["blocks"].pop("mlp")
        experts = sum(math.prod(x.shape) for x in jax.tree.leaves({k: v for k, v in mlp.items() if k != "router"}))
        router = sum(math.prod(x.shape) for x in jax.tree.leaves(mlp.get("router")))
        rest = 4 * (4 * e.model.width**2 + 2 * e.model.width * e.model.context) + 257 * e.model.width
        return share * experts + router + rest

    if held == "flops_by_width":
        assert products(found, 1 / 4) == pytest.approx(products(base, 1), rel=0.011)
        assert counted(found)["parameters"] > 1.5 * counted(base)["parameters"]
    else:
        assert counted(found)["parameters"] == pytest.approx(counted(base)["parameters"], rel=0.01)
        assert products(found, 1 / 4) < 0.8 * products(base, 1)


def test_the_warm_up_and_the_evaluations_keep_their_share() -> None:
    e = Experiment(tokenizer=Bytes(), train=Train(steps=1000, warmup=100, eval_every=250))
    found = equal.with_steps(e, 400).train
    assert (found.steps, found.warmup, found.eval_every) == (400, 40, 100)
    assert equal.with_steps(e, 0).train.steps == 1


def test_every_quantity_can_be_held() -> None:
    assert {quantity for quantity, _ in HELD.values()} == set(QUANTITIES)
