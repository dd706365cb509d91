"""Continue prompts, compiled: with a key/value cache, or the tutorial's way, the whole text again for every token.

B rows, P prompt positions, S places for text, V vocabulary.
"""

import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from transformer.config import Experiment
from transformer.errors import UserError
from transformer.generation.prefill import Generator, Text, prefill, whole
from transformer.generation.sampling import choose
from transformer.model.attention import endless
from transformer.model.masks import FAR, Mask, causal
from transformer.model.transformer import unstack
from transformer.parallel.context import devices
from transformer.parallel.rules import put, spec
from transformer.training.state import key

SMALLEST = 16  # lengths are rounded up to powers of two from here on, so that few programs are compiled


class Continuation(NamedTuple):
    """One prompt's result. ``ids`` are new, without the end token; ``ended`` says whether one was met."""

    ids: list[int]
    ended: bool


def continue_prompts(
    generator: Generator,
    params: Any,
    prompts: Sequence[Sequence[int]],
    new: int,
    seed: int = 0,
    chunk: int | None = None,
) -> Iterator[list[Continuation]]:
    """Yield every prompt's continuation so far, every ``chunk`` tokens and at the end.

    Prompts are ids that begin with the start token and may differ in length; the result of each is
    the same as alone up to rounding. Raises UserError where a prompt and its ``new`` tokens do not
    fit the context (text is never cut off to make it fit).
    """
    check_fits(generator.experiment, prompts, new, generator.end_ids)
    if devices() > 1:
        raise UserError("config.mesh.context: text is generated one position after the other, set it to 1 for that")
    longest, rows = max(map(len, prompts)), _round_up(len(prompts), 1)
    places = _round_up(longest + new)
    if not endless(generator.experiment.model):
        places = min(places, generator.experiment.model.context)
    tokens_BP = np.zeros((rows, min(_round_up(longest), places)), np.int32)  # behind a prompt nothing is read
    lengths_B = np.ones(rows, np.int32)
    for b, prompt in enumerate(prompts):
        tokens_BP[b, : len(prompt)] = prompt
        lengths_B[b] = len(prompt)
    done_B = np.arange(rows) >= len(prompts)
    limits_B = lengths_B + new
    text = prefill(generator, params, tokens_BP, lengths_B, done_B, places)
    left = new
    while left:
        text = extend(generator, params, text, limits_B, min(chunk or new, left), np.uint32(seed))
        left -= min(chunk or new, left)
        tokens_BS, ends_B, done_B = (np.asarray(x) for x in (text.tokens_BS, text.lengths_B, text.done_B))
        if done_B.all():
            left = 0
        yield [_continuation(generator, tokens_BS[b, len(p) : ends_B[b]]) for b, p in enumerate(prompts)]
    if not new:
        yield [Continuation([], False) for _ in prompts]


def _continuation(generator: Generator, ids: np.ndarray) -> Continuation:
    ended = len(ids) > 0 and ids[-1] in generator.end_ids
    return Continuation([int(i) for i in (ids[:-1] if ended else ids)], bool(ended))


def _round_up(number: int, smallest: int = SMALLEST) -> int:
    return max(smallest, 1 << (number - 1).bit_length())


def check_fits(experiment: Experiment, prompts: Sequence[Sequence[int]], new: int, end_ids: Sequence[int]) -> None:
    """UserError where prompt plus new tokens exceed the context, or an id is outside the vocabulary."""
    context = experiment.model.context
    for number, prompt in enumerate(prompts, 1):
        assert len(prompt) > 0, "a prompt has at least its start token"
        starts = prompt.count(end_ids[0]) if end_ids else 0
        if starts > 1:
            raise UserError(f"prompt {number}: holds the start token {starts} times; it is added once")
        if min(prompt) < 0 or max(prompt) >= experiment.vocab_size:
            raise UserError(f"prompt {number}: holds an id outside the vocabulary of {experiment.vocab_size}")
        if len(prompt) + new > context and not endless(experiment.model):
            room = context - len(prompt)
            hint = f"shorten it or ask for --tokens={room}" if room > 0 else "shorten it"
            raise UserError(
                f"prompt {number}: {len(prompt)} tokens (with its start) and {new} new ones exceed the context of "
                f"{context}; {hint}"
            )


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def extend(
    generator: Generator, params: Any, text: Text, limits_B: jax.Array, steps: jax.Array, seed: jax.Array
) -> Text:
    """Up to ``steps`` more tokens on every row that is not done; ends early when all are."""
    B = text.tokens_BS.shape[0]
    params = unstack(generator.experiment.model, params)
    limits_B, rows_B = put(limits_B, "batch"), put(jnp.arange(B), "batch")
    row_keys_B = jax.vmap(lambda row: jax.random.fold_in(key(seed, "sample"), row))(rows_B)

    def step(carry: tuple[jax.Array, Text]) -> tuple[jax.Array, Text]:
        count, text = carry
        # The key depends on the row and the place alone: neither chunks nor the cache change the draw.
        keys_B = jax.vmap(jax.random.fold_in)(row_keys_B, text.lengths_B)
        new_B = choose(generator.sampling, text.logits_BV, text.seen_BV, keys_B)
        place_B = jnp.where(text.done_B, FAR, text.lengths_B)
        tokens_BS = text.tokens_BS.at[rows_B, place_B].set(new_B, mode="drop", out_sharding=spec("batch", "time"))
        lengths_B = jnp.where(text.done_B, text.lengths_B, text.lengths_B + 1)
        ended_B = (new_B[:, None] == jnp.array(generator.end_ids, jnp.int32)[None]).any(1)
        done_B = text.done_B | ended_B | (lengths_B >= limits_B)
        seen_BV = text.seen_BV
        if seen_BV.shape[1]:
            seen_BV = seen_BV | (~text.done_B[:, None] & (new_B[:, None] == jnp.arange(seen_BV.shape[1])[None]))
        logits_BV, cache = next_logits(generator, params, tokens_BS, lengths_B, new_B, place_B, text.cache)
        return count + 1, Text(tokens_BS, lengths_B, done_B, logits_BV, seen_BV, cache)

    def unfinished(carry: tuple[jax.Array, Text]) -> jax.Array:
        return (carry[0] < steps) & ~carry[1].done_B.all()

    return jax.lax.while_loop(unfinished, step, (jnp.int32(0), text))[1]


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
