"""plan: FLOPs and weights by part of the model, for every kind of attention and for a mixture of experts.

Traced here with the plain kernel, whose products are all in the program; TPUs' own kernel is counted by formula, which
is held to what that kernel's own tables and programs say.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from tests import small
from transformer.analysis import ahead, plan
from transformer.analysis.cost import count_parameters, forward_flops
from transformer.config import Experiment
from transformer.model import fused, grouping
from transformer.model.attention import Attention, kind
from transformer.model.differential import Differential
from transformer.model.grouped import Grouped
from transformer.model.latent import Latent
from transformer.model.linear import Linear
from transformer.model.masks import causal
from transformer.model.moe import Moe
from transformer.model.positions import Alibi, Rotary
from transformer.model.scores import NOTHING, Sigmoid, Softmax
from transformer.model.spans import Chunked, Pattern, Sliding
from transformer.parallel.mesh import Mesh

KINDS: dict[str, dict[str, Any]] = {
    "grouped": {"attention": Attention(projection=Grouped(kv_heads=2))},
    "latent": {"attention": Attention(projection=Latent(kv_rank=16, rope_width=8)), "positions": Rotary()},
    "differential": {"attention": Attention(projection=Differential())},
    "linear": {"attention": Attention(projection=Linear())},
    "value residual": {"attention": Attention(value_residual="fixed")},
    "experts": {"mlp": Moe(experts=8, top_k=2, shared=1, width=96)},
}


def traced(e: Experiment) -> tuple[dict[str, float], dict[str, float]]:
    """FLOPs of the training step's products and bytes of weights, by part, as `ahead` finds them."""
    with small.on(e.mesh):
        step, params, _ = ahead._train(e)
        return ahead.products(step.jaxpr.jaxpr, ahead.filled(e)), ahead._weights(params)


@pytest.mark.parametrize("name", KINDS)
def test_every_part_has_the_flops_and_weights_of_its_formula(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grouping, "platform", lambda: "tpu")
    e = small.experiment(width=64, context=128, stack="scan", train={"batch": 2}, **KINDS[name])
    m, (flops, weights) = e.model, traced(e)
    step = 3 * 2 * e.train.batch * m.context
    active = m.mlp.matrices(m.width) - m.mlp.idle(m.width)
    again = m.width**2 if name == "value residual" else 0  # the first block's values
    attention = m.depth * kind(m).matrices(m) + again + forward_flops(e)["attention_tables"] / 2
    assert flops["attention"] == pytest.approx(step * attention, rel=0.02)
    assert flops["mlp"] == pytest.approx(step * m.depth * active, rel=0.02)
    assert flops["unembedding"] == step * e.vocab_size * m.width
    norm, parts = m.width, count_parameters(e)
    assert weights["attention"] == 4 * m.depth * (kind(m).matrices(m) + kind(m).rest(m) + norm)
    assert weights["mlp"] == 4 * m.depth * (m.mlp.matrices(m.width) + norm)
    assert weights["unembedding"] == weights["embedding"] == 4 * parts["embedding"]
    assert sum(weights.values()) == 4 * parts["total"]


def test_experts_that_are_cut_do_no_more_than_whole_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though each device has room for all tokens of those that it shares the experts with."""
    monkeypatch.setattr(grouping, "platform", lambda: "tpu")
    mixture: dict[str, Any] = {"width": 64, "mlp": Moe(experts=8, top_k=3, width=96)}
    cut, whole = (traced(small.experiment(mesh=mesh, **mixture)) for mesh in (Mesh(expert=4, fsdp=2), Mesh()))
    assert cut[0]["mlp"] == pytest.approx(whole[0]["mlp"], rel=0.02)
    assert cut[0]["unembedding"] == whole[0]["unembedding"], "the loss's own products, of which some are never used"
    assert whole[1]["mlp"] / 8 <= cut[1]["mlp"] < 1.1 * whole[1]["mlp"] / 8


# The TPU's own kernel


@pytest.mark.parametrize(("context", "window"), [(1024, None), (2048, 700), (384, 128), (384, 129), (512, 1)])
def test_splash_works_through_the_blocks_of_its_own_table(context: int, window: int | None) -> None:
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask_info as info

    seen = masks.CausalMask((context,) * 2) if window is None else masks.LocalMask((context,) * 2, (window - 1, 0), 0)
    block = fused.splash_block(context)
    table, _ = info.process_mask(masks.MultiHeadMask([seen]), (block, block))
    assert table.block_mask is not None
    assert fused.splash_pairs(context, window) == (table.block_mask > 0).sum() * block**2


def test_splash_has_as_many_products_as_its_programs() -> None:
    """Traced forward and backward, with keys and values of unlike widths: the products of a pair of blocks."""
    T, shape = 256, (1, 256, 1, 1)
    q, k, v = (jnp.zeros((*shape[: n - 1], H), jnp.bfloat16) for n, H in ((5, 64), (4, 64), (4, 96)))

    def loss(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return fused.splash(q, k, v, causal(T), NOTHING).astype(jnp.float32).sum()

    found = []

    def visit(jaxpr: Any) -> None:
        for e in jaxpr.eqns:
            if e.primitive.name == "pallas_call":
                found.append(sum(ahead._products(e.params["jaxpr"], 1.0, 1, "").values()))
            else:
                [visit(inner) for value in e.params.values() for inner in ahead._jaxprs(value)]

    visit(jax.make_jaxpr(jax.grad(loss, (0, 1, 2)))(q, k, v).jaxpr)
    assert len(found) == 3
    assert sum(found) == 2 * T**2 * fused.splash_products(64, 96, forward=1)


@pytest.mark.parametrize(
    ("settings", "blocks"),
    [
        ({}, (3, 3)),  # of two by two blocks of 512, three are seen
        ({"attention": Attention(span=Sliding(window=128))}, (3, 3)),
        ({"attention": Attention(scores=Softmax(soft_cap=5.0))}, (3, 3)),
        ({"attention": Attention(span=Pattern(local=Chunked(chunk=64)))}, (0, 3)),
        ({"attention": Attention(scores=Sigmoid())}, (0, 0)),
        ({"attention": Attention(scores=Softmax(sinks=True))}, (0, 0)),
        ({"attention": Attention(projection=Linear())}, (0, 0)),
        ({"attention": Attention(kernel="blockwise")}, (0, 0)),
        ({"positions": Alibi()}, (0, 0)),
        ({"mesh": Mesh(context=2)}, (0, 0)),
        ({"context": 960}, (0, 0)),
    ],
)
def test_the_formula_counts_the_blocks_that_the_kernel_computes(settings: dict[str, Any], blocks: Any) -> None:
    """4 heads of 8; nine products, two of them forward, of which none is in the program that was traced."""
    e = small.experiment(**{"width": 32, "context": 1024} | settings)
    assert plan.attention_flops(e, "tpu") == e.train.batch * 4 * 2 * 9 * 8 * 512**2 * sum(blocks)
    again = dataclasses.replace(e, model=dataclasses.replace(e.model, remat="full", loops=2))
    assert plan.attention_flops(again, "tpu") == e.train.batch * 4 * 2 * 2 * 11 * 8 * 512**2 * sum(blocks)
