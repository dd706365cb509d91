"""Differential attention and value residuals: their limits, what depends on a block's number, what is refused."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import small
from transformer.config import check
from transformer.errors import UserError
from transformer.model.attention import Attention
from transformer.model.differential import Differential, DifferentialAttention
from transformer.model.grouped import GroupedAttention
from transformer.model.latent import Latent
from transformer.model.masks import causal
from transformer.model.place import Place
from transformer.model.positions import Rotary
from transformer.model.transformer import Transformer
from transformer.training.state import init_params

D, N, H, DEPTH = 16, 4, 4, 3


def attention(e: Any, module: Any, weights: Any, x: Any, number: int) -> np.ndarray:
    found, _ = module(e.model).apply({"params": weights}, x, causal(x.shape[1]), place=Place(number))
    return np.asarray(found)


@pytest.mark.parametrize("number", [2])
def test_without_its_second_map_it_is_multi_head_attention_with_half_as_wide_queries(number: int) -> None:
    """Lambda is made zero: exp(0) - exp(log(1 + l0)) + l0. What is left is the first map alone, which multi-head
    attention has where the second half of each query is zero; then the norm over heads, by NumPy."""
    e, plain = small.experiment(attention=Attention(projection=Differential()), depth=DEPTH), small.experiment()
    rows = jax.tree.map(lambda w: w[0], small.weights(e)["blocks"]["attention"])
    start = 0.8 - 0.6 * np.exp(-0.3 * number)
    ones = np.zeros((4, 2), np.float32)
    ones[2, 0], ones[3, 0] = 1, np.log(1 + start)
    rows |= {"lambda": ones, "out": {"w": np.eye(D, dtype=np.float32).reshape(N, H, D)}}
    half = np.array([1, 1, 0, 0], np.float32)
    alone = {name: rows[name] for name in ("value", "out", "key")}
    alone["query"] = {"w": rows["query"]["w"] * half * np.float32(np.sqrt(H / (H / 2)))}  # the other's 1 / sqrt(H)
    x = np.random.default_rng(0).normal(size=(2, 6, D)).astype(np.float32)
    mixed = attention(plain, GroupedAttention, alone, x, number).reshape(2, 6, N, H).astype(np.float64)
    size = np.sqrt(np.square(mixed).mean(-1, keepdims=True) + e.model.norm.epsilon)
    wanted = (1 - start) * (mixed / size * rows["norm"]["scale"]).reshape(2, 6, D)
    assert small.far(attention(e, DifferentialAttention, rows, x, number), wanted) < 1e-5
    rows["lambda"] = rows["lambda"] * 1.5
    assert small.far(attention(e, DifferentialAttention, rows, x, number), wanted) > 1e-2


def test_learning_can_start() -> None:
    """The vectors of lambda begin away from zero, where their gradients would be zero, about 0.1 in size."""
    e = small.experiment(attention=Attention(projection=Differential()), width=128)
    drawn = np.asarray(small.jit(init_params, static_argnums=0)(e)["blocks"]["attention"]["lambda"])
    assert drawn.shape == (2, 4, 16)
    assert drawn.std() == pytest.approx(0.1, rel=0.3)


@pytest.mark.parametrize("stack", ["unroll", "scan"])
def test_shares_of_values_go_to_whom_they_name(stack: Any) -> None:
    """Nothing of the first block's and all of its own: no value residual. The other way round: what later blocks' own
    values would be is all the same, and the first block's are not."""
    e, plain = (small.experiment(stack=stack, attention=Attention(value_residual=x)) for x in ("learned", "none"))
    params, rows = small.weights(plain), small.batch(e)
    own = params["blocks"]["attention"]

    def logits(shares: list[float], changed: int | None = None) -> np.ndarray:
        value = own["value"]["w"].copy()
        if changed is not None:
            value[changed] += 1
        new = own | {"value": {"w": value}, "value_shares": np.tile(np.float32(shares), (2, 1))}
        return np.asarray(small.compiled_logits(e, params | {"blocks": params["blocks"] | {"attention": new}}, rows))

    assert small.far(logits([0, 2]), small.compiled_logits(plain, params, rows)) < 1e-5
    assert np.array_equal(logits([2, 0]), logits([2, 0], changed=1))
    assert small.far(logits([2, 0]), logits([2, 0], changed=0)) > 1e-2


def test_a_scanned_block_knows_its_place_in_every_loop() -> None:
    """Its number, whether it is the first of all, and its own dropout: as unrolled."""
    found = []
    for stack in ("unroll", "scan"):
        attention = Attention(projection=Differential(), value_residual="learned")
        e = small.experiment(depth=3, loops=2, stack=stack, attention=attention, dropout=0.2)
        params, rows = jax.tree.map(jnp.asarray, (small.weights(e), small.batch(e, rows=2)))
        model, mask = Transformer(e.model, e.vocab_size, train=True), causal(8, rows.segments_BT)
        run = small.jit(
            lambda p, rows, mask, model=model: model.apply(
                {"params": p}, rows.tokens_BT, rows.positions_BT, mask, rngs={"dropout": jax.random.key(0)}
            )[0]
        )
        found.append(np.asarray(run(params, rows, mask)))
    assert small.far(found[1], found[0]) < 1e-5


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"attention": Attention(projection=Differential()), "head_width": 5}, "halves heads, and their width is 5"),
        (
            {"attention": Attention(projection=Differential()), "head_width": 6, "positions": Rotary()},
            "positions.share: .* 3 numbers of a head",
        ),
        (
            {"attention": Attention(value_residual="fixed"), "depth": 1},
            "value_residual: has no effect in a single block",
        ),
        (
            {"attention": Attention(projection=Latent(), value_residual="learned")},
            "value_residual: latent .* no values",
        ),
    ],
)
def test_what_cannot_be_is_refused_by_name(settings: Any, words: str) -> None:
    with pytest.raises(UserError, match=words):
        check(small.experiment(**settings))
