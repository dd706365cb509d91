"""What tests of generation share: a tiny model, and the logits of the model alone to compare with.

B rows, S places for text, V vocabulary.
"""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import small
from transformer.config import Experiment
from transformer.data.tokenizer import Unigram
from transformer.generation.sampling import Sampling
from transformer.model.config import Model
from transformer.model.masks import causal
from transformer.model.transformer import Transformer

V, END = 23, 22
GREEDY = Sampling(temperature=0.0)


def experiment(**changes: Any) -> Experiment:
    model = dataclasses.replace(Model(depth=2, width=16, heads=4, context=16), **changes)
    return Experiment(model=model, tokenizer=Unigram(vocab_size=V))


@pytest.fixture(autouse=True, scope="module")
def quick_compiler() -> Iterator[None]:
    """The same mathematics, a fifth of the time to compile, for the library's own compiled functions."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def weights(config: Experiment, size: float = 0.5) -> Any:
    """Random weights, large enough that every part has a say in the logits."""
    return jax.tree.map(jnp.asarray, small.weights(config, size=size))


def plain(config: Experiment, params: Any, tokens_BS: np.ndarray) -> np.ndarray:
    """Logits after every token, [B, S, V], from the model alone: no cache, no padding, no generation code."""
    S, context = tokens_BS.shape[1], config.model.context
    whole_BT = np.pad(tokens_BS, ((0, 0), (0, context - S)))  # a causal model never looks at what was added
    return np.asarray(_plain(config, params, whole_BT))[:, :S]


@functools.partial(small.jit, static_argnums=0)
def _plain(config: Experiment, params: Any, tokens_BT: jax.Array) -> jax.Array:
    B, T = tokens_BT.shape
    index_BT = jnp.tile(jnp.arange(T), (B, 1))
    return Transformer(config.model, config.vocab_size).apply({"params": params}, tokens_BT, index_BT, causal(T))[0]
