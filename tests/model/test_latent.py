"""Latent attention: at full rank it is multi-head attention, it remembers latents alone, and reads them as they lie."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import small
from tests.model import oracle
from transformer.analysis.cost import cache
from transformer.config import check
from transformer.errors import UserError
from transformer.model.attention import Attention
from transformer.model.latent import Latent
from transformer.model.masks import Mask
from transformer.model.positions import Alibi, Rotary
from transformer.model.scores import Softmax
from transformer.model.spans import Pattern
from transformer.model.transformer import Transformer, empty_cache

D, N, H = 16, 4, 4


def latent(**settings: Any) -> Attention:
    return Attention(projection=Latent(**settings))


def step(e: Any, params: Any, places: int) -> Any:
    """A function of (tokens, index, cache): the logits after each token, and the cache with them."""
    model = Transformer(e.model, e.vocab_size)

    def run(tokens: Any, index: Any, held: Any) -> Any:
        mask = Mask(index, jnp.arange(places, dtype=jnp.int32)[None])
        return model.apply({"params": params}, tokens, index, mask, held, index)

    return run


def test_at_full_rank_and_without_a_rotary_part_it_is_multi_head_attention() -> None:
    """The latent is the stream itself; keys and values are widened by multi-head attention's own weights. The whole row
    and, from the cache, token by token: what absorbs the widenings gives the same."""
    plain, wide = small.experiment(), small.experiment(attention=latent(kv_rank=D, norm=False))
    params = small.weights(plain)
    own = params["blocks"]["attention"]
    same = np.broadcast_to(np.eye(D, dtype=np.float32), (2, D, D))
    mapped = {"key": own["key"]["w"], "value": own["value"]["w"], "query": own["query"], "out": own["out"]}
    blocks = params["blocks"] | {"attention": mapped | {"key_value_down": {"w": same}}}
    rows = small.batch(plain)
    wanted = np.asarray(small.compiled_logits(plain, params, rows))
    found = np.asarray(small.compiled_logits(wide, params | {"blocks": blocks}, rows))
    assert small.far(found, wanted) < 1e-5
    mapped_params = jax.tree.map(jnp.asarray, params | {"blocks": blocks})
    one_document = rows._replace(segments_BT=np.ones_like(rows.segments_BT), positions_BT=np.tile(np.arange(8), (8, 1)))
    wanted = np.asarray(small.compiled_logits(plain, params, one_document))
    run, held = small.jit(step(wide, mapped_params, 8)), empty_cache(wide.model, 8, 8)
    for t in range(8):
        logits, held = run(rows.tokens_BT[:, t : t + 1], np.full((8, 1), t, np.int32), held)
        assert small.far(logits[:, 0], wanted[:, t]) < 1e-5


def test_queries_from_the_stream_and_no_norm() -> None:
    """The settings that the list of variants leaves out."""
    e = small.experiment(attention=latent(kv_rank=5, rope_width=2, norm=False), positions=Rotary(base=50.0), bias=True)
    params, rows = small.weights(e), small.batch(e, rows=1, padding=0)
    found = np.asarray(small.compiled_logits(e, params, rows))[0]
    assert small.far(found, oracle.row_logits(e.model, params, rows.tokens_BT[0], rows.segments_BT[0])) < 1e-5


@pytest.mark.parametrize("positions", [Rotary(), Alibi()])
def test_a_cache_holds_the_latent_and_the_rotary_key_alone(positions: Any) -> None:
    """The bytes of `cost` are those allocated; and one step writes down no key or value of every place and head."""
    places = 512
    e = small.experiment(attention=latent(kv_rank=6, rope_width=2), positions=positions, context=places, depth=3)
    held = empty_cache(e.model, 1, places)
    numbers = 6 + (2 if isinstance(positions, Rotary) else 0)
    assert sum(x.nbytes for x in jax.tree.leaves(held)) == cache(e)["bytes_per_context"] == 3 * numbers * 4 * places
    token = jnp.zeros((1, 1), jnp.int32)
    jaxpr = jax.make_jaxpr(step(e, jax.tree.map(jnp.asarray, small.weights(e)), places))(token, token, held)
    largest = max(v.aval.size for equation in jaxpr.eqns for v in equation.outvars)
    assert largest < places * N * H


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"attention": latent(kv_rank=0)}, "projection.kv_rank: 0 is too small"),
        ({"attention": latent(q_rank=0)}, "projection.q_rank: 0 is too small"),
        ({"attention": latent(rope_width=0), "positions": Rotary()}, "projection.rope_width: 0 is too small"),
        ({"attention": latent(rope_width=3), "positions": Rotary()}, "positions.share: .* 3 numbers of a head"),
        ({"attention": latent(rope_width=8)}, "projection.rope_width: 8 has no effect here: only rotary"),
        ({"attention": Attention(projection=Latent(), qk_norm="head")}, "qk_norm: latent .* writes out no keys"),
        (
            {"attention": Attention(projection=Latent(), span=Pattern(rotate_global=False)), "positions": Rotary()},
            "rotate_global: false would leave blocks",
        ),
        (
            {"attention": Attention(projection=Latent(), scores=Softmax(sinks=True), kernel="splash")},
            "kernel: splash knows no sinks",
        ),
    ],
)
def test_what_it_cannot_have_is_refused_by_name(settings: Any, words: str) -> None:
    with pytest.raises(UserError, match=words):
        check(small.experiment(**settings))
