"""The bill by formula, against the built model, the compiler's count and real arrays."""

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from transformer.analysis.cost import (
    block_matrices,
    cache,
    cost,
    count_parameters,
    forward_flops,
    human,
    score_tables,
    text,
    training_flops,
    training_memory,
)
from transformer.config import Experiment, load
from transformer.data.tokenizer import Bytes, Unigram
from transformer.model.attention import KINDS, Attention
from transformer.model.config import Model
from transformer.model.grouped import Grouped, MultiHead, MultiQuery
from transformer.model.masks import causal
from transformer.model.mlp import Gelu, Swiglu
from transformer.model.moe import Moe
from transformer.model.norms import LayerNorm, RmsNorm
from transformer.model.positions import POSITIONS, Rotary
from transformer.model.spans import Chunked, Global, Pattern, Sliding
from transformer.model.transformer import Transformer, empty_cache
from transformer.training.config import Train
from transformer.training.optimizer import Adamw, Muon
from transformer.training.state import init_params, init_state

FILES = [
    path
    for path in sorted((Path(__file__).parents[2] / "experiments").glob("[!_]*.py"))
    if "def get_config" in path.read_text()
]
TUTORIAL = Experiment(
    model=Model(depth=6, width=512, heads=8, context=1024), tokenizer=Unigram(vocab_size=50_257), train=Train(batch=16)
)


def changed(experiment: Experiment, **model: Any) -> Experiment:
    return dataclasses.replace(experiment, model=dataclasses.replace(experiment.model, **model))


def built(experiment: Experiment) -> dict[str, int]:
    """What the model itself declares, by part. Nothing is computed."""
    shapes = jax.eval_shape(lambda: init_params(experiment))
    sizes = {name: sum(x.size for x in jax.tree.leaves(tree)) for name, tree in shapes.items()}
    return {"unembedding": 0, "positions": 0, **sizes, "total": sum(sizes.values())}


def assert_counts(experiment: Experiment) -> None:
    found, wanted = count_parameters(experiment), built(experiment)
    assert {name: found[name] for name in wanted} == wanted
    assert found["block"] * experiment.model.depth == found["blocks"]


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_parameters_of_every_experiment_file(path: Path) -> None:
    assert_counts(load(str(path), {}))


@pytest.mark.parametrize("projection", list(KINDS), ids=lambda cls: cls.__name__)
@pytest.mark.parametrize("bias", [False, True])
def test_parameters_of_every_kind_of_attention(projection: type, bias: bool) -> None:
    base = Experiment(tokenizer=Bytes())
    shared = projection in (MultiHead, MultiQuery, Grouped)  # of the others test_forward counts many more
    some, widths = (POSITIONS, (None, 6)) if shared else ((Rotary,), (8,))
    for positions, head_width in itertools.product(some, widths):
        sizes = {"depth": 3, "width": 16, "heads": 4, "context": 8, "head_width": head_width, "bias": bias}
        model = Model(**sizes, attention=Attention(projection=projection()), positions=positions())
        assert_counts(dataclasses.replace(base, model=model))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_parameters_of_every_norm_and_mlp(bias: bool, tied: bool) -> None:
    mlps = Gelu(), Swiglu(), Gelu(width=7), Swiglu(width=9), Moe(experts=5, shared=2, width=3)
    for norm, mlp in itertools.product((LayerNorm(), RmsNorm()), mlps):
        model = Model(depth=2, width=16, heads=4, context=8, bias=bias, tie_embeddings=tied, norm=norm, mlp=mlp)
        assert_counts(Experiment(model=model, tokenizer=Bytes()))


def test_of_a_mixture_a_token_meets_the_experts_that_it_goes_through() -> None:
    """Active parameters and FLOPs are those of the same model with no more experts than that, but for the router."""
    many, few = (changed(TUTORIAL, mlp=Moe(experts=n, top_k=2, shared=1, width=64), bias=True) for n in (8, 2))
    routers = 6 * 6 * 512  # of six blocks, six experts more
    assert cost(many)["parameters"]["active"] == cost(few)["parameters"]["total"] + routers + 6 * 6
    assert sum(forward_flops(many).values()) == sum(forward_flops(few).values()) + 2 * routers
    idle = 6 * 6 * (3 * 512 * 64 + 2 * 64 + 512)
    assert cost(many)["parameters"]["total"] - cost(many)["parameters"]["active"] == idle
    assert f"of which a token meets {block_matrices(many.model) - 6 * 3 * 512 * 64:,}" in text(many)
    assert cost(TUTORIAL)["parameters"]["active"] == cost(TUTORIAL)["parameters"]["total"]
    dense = changed(TUTORIAL, mlp=Swiglu())
    assert 0 < forward_flops(changed(TUTORIAL, mlp=Moe()))["blocks"] / forward_flops(dense)["blocks"] - 1 < 0.01


def test_the_tutorials_numbers() -> None:
    """Width 512 and 50,257 entries: one table costs as much as 8.2 blocks."""
    bill = cost(TUTORIAL)
    assert bill["parameters"]["embedding"] == 25_731_584
    assert block_matrices(TUTORIAL.model) == 3_145_728 == 12 * 512**2
    assert round(25_731_584 / 3_145_728, 1) == 8.2
    assert "25,731,584" in bill["in_words"][0] and "as much as 8.2 blocks" in bill["in_words"][0]
    assert "and the unembedding as many again" in bill["in_words"][0]
    tied = cost(changed(TUTORIAL, tie_embeddings=True))
    assert "is the same table" in tied["in_words"][0]
    assert bill["parameters"]["total"] - tied["parameters"]["total"] == 25_731_584


def test_twice_the_context_is_four_times_the_tables_and_twice_the_cache() -> None:
    once, twice = TUTORIAL, changed(TUTORIAL, context=2048)
    for name in ("one_block_one_row", "all_blocks_one_row", "one_block", "all_blocks"):
        assert score_tables(twice)[name] == 4 * score_tables(once)[name]
    assert cache(twice)["bytes_per_token"] == cache(once)["bytes_per_token"]
    assert cache(twice)["bytes_per_context"] == 2 * cache(once)["bytes_per_context"]
    assert forward_flops(twice)["attention_tables"] == 2 * forward_flops(once)["attention_tables"]
    assert score_tables(once)["one_block_one_row"] == 8 * 1024 * 1024 * 4


def test_a_lookup_costs_no_flops_and_a_tied_head_costs_its_product() -> None:
    """R02: V = 1000, d = 64: 2 V d = 128000 forward per token for the head, tied or not; the lookup 0."""
    free = Experiment(model=Model(depth=2, width=64, heads=4, context=32), tokenizer=Unigram(vocab_size=1000))
    tied = changed(free, tie_embeddings=True)
    assert forward_flops(free) == forward_flops(tied)
    assert forward_flops(free)["unembedding"] == 128_000
    assert sum(forward_flops(free).values()) == 128_000 + 2 * 2 * 12 * 64**2 + 2 * 2 * 2 * 32 * 64
    assert training_flops(free) == 3 * sum(forward_flops(free).values()) == cost(free)["flops_per_token"]["training"]


VARIED = [
    Model(depth=2, width=128, heads=4, context=64, stack="unroll"),
    Model(depth=3, width=96, heads=3, context=128, stack="unroll", mlp=Swiglu(), tie_embeddings=True),
]
VARIED += [
    Model(depth=2, width=128, heads=4, context=64, stack="unroll", attention=Attention(projection=projection()))
    for projection in list(KINDS)[1:]
]


def compilers_count(experiment: Experiment, train: bool) -> float:
    """FLOPs of a forward pass (and its backward pass) over whole rows, by XLA, per token."""
    B, T = 4, experiment.model.context
    model = Transformer(experiment.model, experiment.vocab_size)
    tokens_BT = jnp.zeros((B, T), jnp.int32)

    def forward(params: Any) -> jax.Array:
        logits_BTV = model.apply({"params": params}, tokens_BT, tokens_BT, causal(T))[0]
        return logits_BTV.sum() if train else logits_BTV

    params = jax.eval_shape(lambda: init_params(experiment))
    lowered = jax.jit(jax.grad(forward) if train else forward).lower(params)
    return float(lowered.cost_analysis()["flops"]) / (B * T)


@pytest.mark.parametrize("model", VARIED, ids=lambda m: f"{type(m.attention.projection).__name__}-{m.width}")
@pytest.mark.parametrize("train", [False, True], ids=["forward", "training"])
def test_flops_against_the_compilers_count(model: Model, train: bool) -> None:
    """Unrolled, since XLA counts a loop's body once. Within 5 %: it counts norms and softmax, we count products."""
    experiment = Experiment(model=model, tokenizer=Bytes())
    formula = training_flops(experiment) if train else sum(forward_flops(experiment).values())
    assert compilers_count(experiment, train) == pytest.approx(formula, rel=0.05)


def shapes_in(jaxpr: Any) -> set[tuple[tuple[int, ...], str]]:
    """Shape and dtype of everything that a computation writes down."""
    found = set()
    for equation in jaxpr.eqns:
        found |= {(v.aval.shape, str(v.aval.dtype)) for v in equation.outvars if hasattr(v.aval, "shape")}
        for value in equation.params.values():
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                found |= shapes_in(inner)
    return found


def test_the_score_table_has_the_size_of_the_real_array() -> None:
    """The largest float32 array with two dimensions of T in the plain kernel's forward pass."""
    B, T = 2, 24
    model = Model(depth=1, width=16, heads=4, context=T, attention=Attention(projection=next(iter(KINDS))()))
    experiment = Experiment(model=model, tokenizer=Bytes(), train=Train(batch=2 * B, accumulate=2))
    tokens_BT = jnp.zeros((B, T), jnp.int32)
    net = Transformer(model, 257)
    params = jax.eval_shape(lambda: init_params(experiment))
    jaxpr = jax.make_jaxpr(lambda p: net.apply({"params": p}, tokens_BT, tokens_BT, causal(T))[0])(params)
    tables = [s for s, dtype in shapes_in(jaxpr.jaxpr) if s.count(T) == 2 and dtype == "float32"]
    largest = max(tables, key=lambda s: jnp.prod(jnp.array(s)).item())
    assert 4 * int(jnp.prod(jnp.array(largest))) == score_tables(experiment)["one_block"]


@pytest.mark.parametrize("projection", list(KINDS), ids=lambda cls: cls.__name__)
@pytest.mark.parametrize(("dtype", "stack"), [("float32", "unroll"), ("bfloat16", "scan")])
def test_the_cache_has_the_size_of_the_real_one(projection: type, dtype: Any, stack: Any) -> None:
    sizes: Any = {"depth": 3, "width": 16, "heads": 4, "context": 32, "dtype": dtype, "stack": stack}
    model = Model(**sizes, attention=Attention(projection=projection()))
    experiment = Experiment(model=model, tokenizer=Bytes())
    real = empty_cache(model, 1, 32)
    assert sum(x.nbytes for x in jax.tree.leaves(real)) == cache(experiment)["bytes_per_context"]
    if KINDS[projection].recurrent is None:
        assert cache(experiment)["bytes_per_context"] == 32 * cache(experiment)["bytes_per_token"]


@pytest.mark.parametrize("span", [Global(), Sliding(window=5), Chunked(chunk=7), Pattern(local=Sliding(window=5))])
@pytest.mark.parametrize("stack", ["unroll", "scan"])
def test_windows_and_int8_have_the_size_of_the_real_ones(span: Any, stack: Any) -> None:
    sizes: Any = {"depth": 3, "width": 16, "heads": 4, "context": 32, "stack": stack, "loops": 2}
    for projection, dtype in itertools.product(KINDS, ("float32", "bfloat16")):
        model = Model(**sizes, dtype=dtype, attention=Attention(projection=projection(), span=span))
        bill = cache(Experiment(model=model, tokenizer=Bytes()))
        for int8 in (False, True) if KINDS[projection].cache_scales else (False,):
            real = jax.eval_shape(lambda model=model, int8=int8: empty_cache(model, 1, 32, int8))
            name = "int8_bytes_per_context" if int8 else "bytes_per_context"
            assert sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(real)) == bill[name]


@pytest.mark.parametrize("optimizer", [Adamw(), Muon()], ids=["adamw", "muon"])
def test_weights_and_moments_have_the_size_of_the_real_ones(optimizer: Any) -> None:
    experiment = Experiment(
        model=Model(depth=2, width=16, heads=4, context=8, bias=True),
        tokenizer=Bytes(),
        train=Train(optimizer=optimizer),
    )
    state = jax.eval_shape(lambda: init_state(experiment))
    bill = training_memory(experiment)
    assert bill["weights"] == bill["gradients"] == sum(4 * x.size for x in jax.tree.leaves(state.params))
    moments = [x for x in jax.tree.leaves(state.opt_state) if jnp.issubdtype(x.dtype, jnp.floating)]
    assert bill["moments"] == sum(4 * x.size for x in moments)
    assert bill["total"] == sum(v for name, v in bill.items() if name != "total")


def test_rematerialisation_keeps_fewer_activations() -> None:
    sizes = {
        r: training_memory(changed(TUTORIAL, remat=r))["activations"] for r in ("none", "full", "dots_without_batch")
    }
    assert sizes["full"] < sizes["dots_without_batch"] < sizes["none"]


@pytest.mark.parametrize(
    ("size", "wanted"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (1536, "1.5 KiB"), (3 << 30, "3.0 GiB"), (5 << 50, "5120.0 TiB")],
)
def test_sizes_for_people(size: int, wanted: str) -> None:
    assert human(size) == wanted


@pytest.mark.parametrize(("span", "keys"), [(Global(), 16384), (Sliding(window=128), 128), (Chunked(chunk=64), 64)])
def test_R03_a_window_is_counted_as_what_it_sees(span: Any, keys: int) -> None:
    """Two products of 2 FLOPs for each head's number and each key in reach, in two blocks."""
    model = Model(depth=2, width=64, heads=4, context=16384, attention=Attention(span=span))
    assert forward_flops(Experiment(model=model, tokenizer=Bytes()))["attention_tables"] == 2 * 2 * 2 * 64 * keys


def test_the_text_names_every_part_and_the_formula() -> None:
    """R03: the formula is named beside the figures."""
    lines = text(TUTORIAL)
    total = count_parameters(TUTORIAL)["total"]
    for words in (
        "embedding",
        "6 blocks",
        "score tables",
        "unembedding",
        f"{total:,}",
        "arXiv:2204.02311",
        "8.2 blocks",
    ):
        assert words in lines
