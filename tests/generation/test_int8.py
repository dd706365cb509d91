"""The int8 cache: its rounding against arithmetic, and the whole against a model whose keys and values are rounded
where they are made, without a cache.

B rows, T positions, S key positions, K key/value heads, H width of one head.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import small
from tests.generation.tiny import GREEDY, V, experiment, plain, quick_compiler, weights  # noqa: F401
from transformer.analysis.evaluate import score_rows
from transformer.generation.decode import extend
from transformer.generation.prefill import Generator, prefill
from transformer.model import cache, kernels
from transformer.model.attention import Attention
from transformer.model.masks import causal
from transformer.model.positions import Rotary
from transformer.model.spans import Pattern, Sliding
from transformer.model.transformer import Transformer


def by_hand(x_BTKH: Any) -> np.ndarray:
    """What is left of keys or values, in float64: 255 equal steps from the largest size down to its negative."""
    x_BTKH = np.asarray(x_BTKH, np.float64)
    largest = np.abs(x_BTKH).max(-1, keepdims=True)
    step = np.where(largest > 0, largest, 1) / 127
    return np.round(x_BTKH / step) * step


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_written_comes_back_to_half_a_step(dtype: str) -> None:
    """Heads of very unlike sizes in one token and over tokens: each has a scale of its own; zeros stay zeros."""
    x_BTKH = np.random.default_rng(0).standard_normal((2, 3, 4, 8)) * np.array([1e-6, 1e-2, 1.0, 1e4])[:, None]
    x_BTKH[1, 1, 2] = 0
    given = jnp.asarray(x_BTKH, dtype)
    empty = cache.in_int8(cache.allocate(2, 5, 4, 8, dtype))
    places_BT = jnp.asarray([[0, 1, 2], [4, 2, 1 << 30]])
    kept = cache.write(empty, places_BT, given, -2 * given)
    assert [x.dtype.name for x in kept] == ["int8", "int8", "float32", "float32"]
    k_BSKH, v_BSKH = (np.asarray(x, np.float64) for x in cache.read(kept, dtype))
    exact = np.asarray(given, np.float64)
    coarse = 2**-8 if dtype == "bfloat16" else 1e-6
    for b, t, s in ((0, 0, 0), (0, 1, 1), (0, 2, 2), (1, 0, 4), (1, 1, 2)):
        largest = np.abs(exact[b, t]).max(-1, keepdims=True)
        for found, size in ((k_BSKH, 1), (v_BSKH, -2)):
            wanted = size * by_hand(exact[b, t])
            np.testing.assert_allclose(found[b, s], wanted, atol=0, rtol=coarse * 1.01)
            assert (np.abs(found[b, s] - size * exact[b, t]) <= abs(size) * largest * (1 / 254 + coarse)).all()
    assert not k_BSKH[0, 3:].any() and not k_BSKH[1, [0, 1, 3]].any(), "nothing else was written"


def test_generation_and_evaluation_read_what_was_rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model with a window and a whole cache, prompts of 1 to 16 tokens in pieces of 5 and three tokens one by one:
    the logits of a model whose keys and values are rounded before attention. `evaluate` scores with the same."""
    attention = Attention(span=Pattern(local=Sliding(window=3)))
    config = experiment(attention=attention, positions=Rotary(), context=20)
    params, rows = weights(config), 16
    tokens_BP = np.random.default_rng(0).integers(0, V, (rows, 17)).astype(np.int32)
    lengths_B = np.arange(1, rows + 1, dtype=np.int32)
    generator = Generator(config, GREEDY, (), piece=5, int8=True)
    text = prefill(generator, params, tokens_BP, lengths_B, lengths_B < 1, 20)
    assert {x.dtype.name for x in jax.tree.leaves(text.cache)} == {"int8", "float32"}
    found = [np.asarray(text.logits_BV)]
    for _ in range(3):
        text = extend(generator, params, text, lengths_B + 3, 1, np.uint32(0))
        found.append(np.asarray(text.logits_BV))
    tokens_BT = np.asarray(text.tokens_BS)
    exact_BTV = plain(config, params, tokens_BT)

    attend = kernels.attend

    def rounding(name: Any, q: Any, k: Any, v: Any, *more: Any) -> Any:
        k, v = (jax.pure_callback(lambda x: np.float32(by_hand(x)), x, x) for x in (k, v))
        return attend(name, q, k, v, *more)

    def forward(tokens_BT: Any) -> Any:
        index_BT = jnp.tile(jnp.arange(20), (rows, 1))
        model = Transformer(config.model, config.vocab_size)
        return model.apply({"params": params}, tokens_BT, index_BT, causal(20))[0]

    model, weights_BT = Transformer(config.model, config.vocab_size), (tokens_BT >= 0).astype(np.float32)
    given = params, tokens_BT, np.roll(tokens_BT, -1, 1), weights_BT, np.ones(rows, np.int32)
    nats_B = np.asarray(score_rows(model, *given, int8=True)[0])
    monkeypatch.setattr(kernels, "attend", rounding)
    rounded_BTV = np.asarray(small.jit(forward)(tokens_BT))

    def off(logits: Any, wanted: Any) -> float:
        return float(np.abs(np.asarray(logits) - wanted).mean())

    cost = off(exact_BTV, rounded_BTV)
    assert 1e-4 < cost < 0.1
    for step, logits_BV in enumerate(found):  # a number may be rounded the other way where it lies between two steps
        assert off(logits_BV, rounded_BTV[np.arange(rows), lengths_B - 1 + step]) < cost / 20
    logs_BTV = rounded_BTV - np.log(np.exp(rounded_BTV).sum(-1, keepdims=True))
    wanted_B = -np.take_along_axis(logs_BTV, np.roll(tokens_BT, -1, 1)[:, :, None], 2)[:, :, 0].sum(1)
    np.testing.assert_allclose(nats_B, wanted_B, rtol=cost / 20)
