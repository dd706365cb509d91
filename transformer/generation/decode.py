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
from transformer.generation.prefill import Generator, Text, next_logits, prefill
from transformer.generation.sampling import choose
from transformer.generation.speculate import Speculation, row_keys, speculate
from transformer.model.attention import check_cache, endless
from transformer.model.masks import FAR
from transformer.model.transformer import unstack
from transformer.parallel.context import devices
from transformer.parallel.rules import put, spec

SMALLEST = 16  # lengths are rounded up to powers of two from here on, so that few programs are compiled


class Continuation(NamedTuple):
    """One prompt's result. ``ids`` are new, without the end token; ``ended`` says whether one was met.

    With a draft: how many tokens it ``proposed``, and how many of these were ``accepted``.
    """

    ids: list[int]
    ended: bool
    proposed: int = 0
    accepted: int = 0


def continue_prompts(
    generator: Generator,
    params: Any,
    prompts: Sequence[Sequence[int]],
    new: int,
    seed: int = 0,
    chunk: int | None = None,
    draft_params: Any = None,
) -> Iterator[list[Continuation]]:
    """Yield every prompt's continuation so far: none when the prompts are read and the programs compiled, then every
    ``chunk`` steps and at the end. A step is a token; with a draft, one or more.

    Prompts are ids that begin with the start token and may differ in length; the result of each is
    the same as alone up to rounding. Raises UserError where a prompt and its ``new`` tokens do not
    fit the context (text is never cut off to make it fit).
    """
    check_fits(generator.experiment, prompts, new, generator.end_ids)
    if devices() > 1:
        raise UserError("config.mesh.context: text is generated one position after the other, set it to 1 for that")
    check_cache(generator.experiment.model, generator.int8, generator.proposals)
    longest, rows = max(map(len, prompts)), round_up(len(prompts), 1)
    if generator.draft is not None:
        check_cache(generator.draft.model, generator.int8, generator.proposals, " of the draft")
        if longest + new > generator.draft.model.context and not endless(generator.draft.model):
            raise UserError(
                f"--draft: {longest} tokens (with the start) and {new} new ones exceed its context of "
                f"{generator.draft.model.context}; ask for fewer --tokens"
            )
    places = round_up(longest + new)
    if not endless(generator.experiment.model):
        places = min(places, generator.experiment.model.context)
    tokens_BP = np.zeros((rows, min(round_up(longest), places)), np.int32)  # behind a prompt nothing is read
    lengths_B = np.ones(rows, np.int32)
    for b, prompt in enumerate(prompts):
        tokens_BP[b, : len(prompt)] = prompt
        lengths_B[b] = len(prompt)
    done_B = np.arange(rows) >= len(prompts)
    limits_B = lengths_B + new
    text = prefill(generator, params, tokens_BP, lengths_B, done_B, places)
    counts_B2 = np.zeros((rows, 2), np.int32)
    if generator.draft is not None:
        draft = prefill(generator.drafter, draft_params, tokens_BP, lengths_B, done_B, places).cache
        state = Speculation(text, draft, *(put(jnp.zeros(rows, jnp.int32), "batch") for _ in range(2)))

    def go_on(steps: int) -> None:
        nonlocal text, counts_B2, state
        if generator.draft is None:
            text = extend(generator, params, text, limits_B, steps, np.uint32(seed))
        else:
            state = speculate(generator, params, draft_params, state, limits_B, steps, np.uint32(seed))
            text, counts_B2 = state.text, np.stack([state.proposed_B, state.accepted_B], 1)

    def so_far() -> list[Continuation]:
        tokens_BS, ends_B = np.asarray(text.tokens_BS), np.asarray(text.lengths_B)
        return [_continuation(generator, tokens_BS[b, len(p) : ends_B[b]], counts_B2[b]) for b, p in enumerate(prompts)]

    go_on(0)  # compiles
    yield so_far()
    left = new
    while left:
        go_on(min(chunk or new, left))
        left -= min(chunk or new, left)
        if np.asarray(text.done_B).all():
            left = 0
        yield so_far()


def _continuation(generator: Generator, ids: np.ndarray, counts: np.ndarray) -> Continuation:
    ended = len(ids) > 0 and ids[-1] in generator.end_ids
    return Continuation([int(i) for i in (ids[:-1] if ended else ids)], bool(ended), *(int(x) for x in counts))


def round_up(number: int, smallest: int = SMALLEST) -> int:
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
    row_keys_B = row_keys(seed, rows_B)

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
