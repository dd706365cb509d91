"""Read text: prompts before they are continued, and each new token.

Prompts are read in pieces, so that what that takes beside the cache does not grow with them.

B rows, P prompt positions, T positions of one piece, S places for text, V vocabulary.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from transformer.config import Experiment
from transformer.generation.sampling import Sampling
from transformer.model.masks import FAR, Mask, causal
from transformer.model.transformer import Transformer, empty_cache, unstack
from transformer.parallel.rules import put

PIECE = 512  # tokens of a prompt that are read at once: docs/speed.md has why


class Text(NamedTuple):
    """Rows being continued. Row b's text is ``tokens_BS[b, :lengths_B[b]]``; what lies behind is never looked at."""

    tokens_BS: jax.Array
    lengths_B: jax.Array
    done_B: jax.Array  # met an end token, reached its limit, or only fills up the batch
    logits_BV: jax.Array  # of the token after the last
    seen_BV: jax.Array  # which tokens are in the text (kept only for the repetition penalty, else [B, 0])
    cache: Any  # None without a cache


@dataclasses.dataclass(frozen=True)
class Generator:
    """A model's settings and how to draw from it. Frozen and hashable: it is what a program is compiled for.

    Any of ``end_ids`` ends a row; the first of them is the start token too. None: rows run to their limit.
    ``piece`` is how many tokens of a prompt are read at once; without a cache it is the whole prompt. ``int8``: the
    cache is. With a ``draft``, a model that proposes ``proposals`` tokens at a time, text is continued by `speculate`.
    """

    experiment: Experiment
    sampling: Sampling
    end_ids: tuple[int, ...]
    use_cache: bool = True
    piece: int = PIECE
    int8: bool = False
    draft: Experiment | None = None
    proposals: int = 0

    @property
    def model(self) -> Transformer:
        return Transformer(self.experiment.model, self.experiment.vocab_size)

    @property
    def drafter(self) -> "Generator":
        """The draft, drawing as this one does."""
        assert self.draft is not None
        return dataclasses.replace(self, experiment=self.draft, draft=None)


@functools.partial(jax.jit, static_argnums=(0, 5))
def prefill(
    generator: Generator,
    params: Any,
    tokens_BP: jax.Array,
    lengths_B: jax.Array,
    done_B: jax.Array,
    places: int,
) -> Text:
    """Read all prompts: their keys and values into an empty cache of ``places``, and the logits after each."""
    experiment = generator.experiment
    B, P = tokens_BP.shape
    T = min(generator.piece, P) if generator.use_cache else P
    tokens_BP, (lengths_B, done_B) = (
        put(tokens_BP, "batch", "time"),
        (put(x, "batch") for x in (lengths_B, done_B)),
    )
    tokens_BS = jnp.pad(tokens_BP, ((0, 0), (0, max(places - P, 0))))[:, :places]
    cache = None
    if generator.use_cache:
        cache = empty_cache(experiment.model, B, places, generator.int8, generator.proposals)

    def read(tokens_BT: jax.Array, first: Any, params: Any, cache: Any) -> tuple[jax.Array, Any]:
        """The logits after each row's last token, where that is in this piece, and the cache with the piece."""
        index_BT = put(first + jnp.tile(jnp.arange(T, dtype=jnp.int32), (B, 1)), "batch", "time")
        to_BT = jnp.where(index_BT < lengths_B[:, None], index_BT, FAR)  # padding is written nowhere
        keys = P if cache is None else places
        mask = Mask(index_BT, jnp.arange(keys, dtype=jnp.int32)[None], ordered=T == P)
        last_B = jnp.clip(lengths_B - 1 - first, 0, T - 1)
        at_BT = jnp.minimum(index_BT, P - 1)  # what fills up the last piece has a position too
        given = {"params": params}, tokens_BT, at_BT, mask, cache, None if cache is None else to_BT
        logits_B1V, cache = generator.model.apply(*given, only_B=last_B)
        return whole(logits_B1V), cache

    if T == P:
        logits_BV, cache = read(tokens_BP, 0, params, cache)
    else:
        pieces_BP = jnp.pad(tokens_BP, ((0, 0), (0, -P % T)))
        unstacked = unstack(experiment.model, params)

        def more(i: jax.Array, carry: tuple[jax.Array, Any]) -> tuple[jax.Array, Any]:
            tokens_BT = jax.lax.dynamic_slice_in_dim(pieces_BP, i * T, T, axis=1)
            here_BV, cache = read(tokens_BT, i * T, unstacked, carry[1])
            return jnp.where(((lengths_B - 1) // T == i)[:, None], here_BV, carry[0]), cache

        empty_BV = put(jnp.zeros((B, experiment.vocab_size), jnp.float32), "batch", None)
        logits_BV, cache = jax.lax.fori_loop(0, -(-lengths_B.max() // T), more, (empty_BV, cache))
    seen = experiment.vocab_size if generator.sampling.repetition_penalty != 1.0 else 0
    real_BP = jnp.arange(P, dtype=jnp.int32)[None] < lengths_B[:, None]
    ids_BP1 = jnp.where(real_BP, tokens_BP, -1)[:, :, None]
    seen_BV = (ids_BP1 == jnp.arange(seen, dtype=jnp.int32)[None, None]).any(1)
    return Text(tokens_BS, lengths_B, done_B, logits_BV, seen_BV, cache)


def next_logits(
    generator: Generator,
    params: Any,
    tokens_BS: jax.Array,
    lengths_B: jax.Array,
    new_B: jax.Array,
    place_B: jax.Array,
    cache: Any,
) -> tuple[jax.Array, Any]:
    """Logits after each row's last token, [B, V]: from the cache and that token, or from the whole text again."""
    B, S = tokens_BS.shape
    variables = {"params": params}
    if cache is None:
        index_BS = put(jnp.tile(jnp.arange(S, dtype=jnp.int32), (B, 1)), "batch", "time")
        last_B = lengths_B - 1
        logits_B1V, _ = generator.model.apply(variables, tokens_BS, index_BS, causal(S), only_B=last_B)
        return whole(logits_B1V), None
    at_B1 = (lengths_B - 1)[:, None]
    mask = Mask(at_B1, jnp.arange(S, dtype=jnp.int32)[None])
    logits_B1V, cache = generator.model.apply(variables, new_B[:, None], at_B1, mask, cache, place_B[:, None])
    return whole(logits_B1V), cache


def whole(logits_B1V: jax.Array) -> jax.Array:
    """[B, V] with the vocabulary in one place, for sorting and drawing."""
    return put(logits_B1V[:, 0], "batch", None)
