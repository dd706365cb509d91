"""Continue text faster with a draft: a smaller model proposes some tokens, the model itself reads them all at once.

Speculative decoding, arXiv:2211.17192 and 2302.01318: a proposal x, drawn from the draft's distribution q, stands with
probability min(1, p(x) / q(x)); at the first that does not, the token is drawn from what p has above q. So every token
comes from the model's own distribution p, after all filters, and greedy choice gives the tokens that it gives alone.

B rows, G proposals, T = G + 1 tokens that the model reads at once, S places for text, V vocabulary.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from transformer.generation.prefill import Generator, Text, next_logits
from transformer.generation.sampling import admitted
from transformer.model.masks import FAR, Mask
from transformer.model.transformer import unstack
from transformer.parallel.rules import put, spec
from transformer.training.state import key

DRAFT, STAND, INSTEAD = 1, 2, 3  # what a place's key is for: its proposal, whether that stands, what comes instead


class Speculation(NamedTuple):
    """Rows being continued. Both caches hold all but the last token of a row: that one is read with the proposals.

    The model's logits in ``text`` are not kept up.
    """

    text: Text
    draft_cache: Any
    proposed_B: jax.Array
    accepted_B: jax.Array


def row_keys(seed: jax.Array, rows_B: jax.Array) -> jax.Array:
    """A random key for each row of a batch."""
    return jax.vmap(lambda row: jax.random.fold_in(key(seed, "sample"), row))(rows_B)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=3)
def speculate(
    generator: Generator,
    params: Any,
    draft_params: Any,
    state: Speculation,
    limits_B: jax.Array,
    rounds: jax.Array,
    seed: jax.Array,
) -> Speculation:
    """Up to ``rounds`` more times one to G + 1 tokens on every row that is not done; ends early when all are."""
    B, G = state.text.tokens_BS.shape[0], generator.proposals
    sampling, drafter = generator.sampling, generator.drafter
    params = unstack(generator.experiment.model, params)
    draft_params = unstack(drafter.experiment.model, draft_params)
    limits_B, rows_B = put(limits_B, "batch"), put(jnp.arange(B), "batch")
    row_keys_B = row_keys(seed, rows_B)

    def keys(places_B: jax.Array, purpose: int) -> jax.Array:
        """Of the row, the place and the purpose alone: a proposal that was never looked at may be drawn again."""
        one = jax.vmap(lambda key, place: jax.random.fold_in(jax.random.fold_in(key, place), purpose))
        return one(row_keys_B, places_B)

    def propose(text: Text, cache: Any) -> tuple[jax.Array, jax.Array, Any]:
        """G tokens [B, G], the distributions that they were drawn from [B, G, V], and the cache that has read them."""

        def one(carry: tuple[jax.Array, jax.Array, Any], g: jax.Array) -> Any:
            token_B, seen_BV, cache = carry
            index_B = text.lengths_B - 1 + g
            place_B = jnp.where(text.done_B | (index_B >= limits_B), FAR, index_B)
            ends_B = jnp.minimum(index_B + 1, limits_B)  # what lies beyond has a position too, and is used nowhere
            given = drafter, draft_params, text.tokens_BS, ends_B, token_B, place_B, cache
            logits_BV, cache = next_logits(*given)
            admitted_BV = admitted(sampling, logits_BV, seen_BV)
            new_B = jax.vmap(jax.random.categorical)(keys(index_B + 1, DRAFT), admitted_BV).astype(jnp.int32)
            return (new_B, with_token(seen_BV, new_B), cache), (new_B, jax.nn.softmax(admitted_BV, -1))

        # One more than is proposed: the last is read too, should it stand.
        start = last(text), text.seen_BV, cache
        (_, _, cache), (tokens_TB, q_TBV) = jax.lax.scan(one, start, jnp.arange(G + 1, dtype=jnp.int32))
        return tokens_TB[:G].T, q_TBV[:G].transpose(1, 0, 2), cache

    def verify(text: Text, tokens_BG: jax.Array) -> tuple[jax.Array, Any]:
        """The model's distributions after its last token and after each proposal, [B, T, V], and its cache."""
        index_BT = (text.lengths_B - 1)[:, None] + jnp.arange(G + 1, dtype=jnp.int32)[None]
        unread_BT = text.done_B[:, None] | (index_BT >= limits_B[:, None])
        at_BT = put(jnp.minimum(index_BT, limits_B[:, None] - 1), "batch", "time")
        read_BT = put(jnp.concatenate([last(text)[:, None], tokens_BG], 1), "batch", "time")
        mask = Mask(at_BT, jnp.arange(text.tokens_BS.shape[1], dtype=jnp.int32)[None])
        to_BT = jnp.where(unread_BT, FAR, index_BT)
        logits_BTV, cache = generator.model.apply({"params": params}, read_BT, at_BT, mask, text.cache, to_BT)
        logits_BTV = put(logits_BTV, "batch", None, None)
        found, seen_BV = [], text.seen_BV
        for t in range(G + 1):
            found.append(jax.nn.softmax(admitted(sampling, logits_BTV[:, t], seen_BV), -1))
            seen_BV = with_token(seen_BV, tokens_BG[:, t]) if t < G else seen_BV
        return jnp.stack(found, 1), cache

    def step(carry: tuple[jax.Array, Speculation]) -> tuple[jax.Array, Speculation]:
        count, (text, draft_cache, proposed_B, accepted_B) = carry
        tokens_BG, q_BGV, draft_cache = propose(text, draft_cache)
        p_BTV, cache = verify(text, tokens_BG)
        first_B = text.lengths_B  # the place of the first proposal
        uniform_BG = jnp.stack([jax.vmap(jax.random.uniform)(keys(first_B + g, STAND)) for g in range(G)], 1)
        stands_BG = uniform_BG * of(q_BGV, tokens_BG) < of(p_BTV[:, :G], tokens_BG)
        standing_B = jnp.cumprod(stands_BG, 1, dtype=jnp.int32).sum(1)
        instead_B = draw(instead(p_BTV, q_BGV, standing_B), keys(first_B + standing_B, INSTEAD))
        nth_1T = jnp.arange(G + 1, dtype=jnp.int32)[None]
        new_BT = jnp.where(nth_1T < standing_B[:, None], jnp.pad(tokens_BG, ((0, 0), (0, 1))), instead_B[:, None])
        room_B = jnp.where(text.done_B, 0, limits_B - first_B)
        taken_B = jnp.minimum(standing_B + 1, room_B)
        end_BT = (new_BT[:, :, None] == jnp.array(generator.end_ids, jnp.int32)[None, None]).any(-1)
        end_BT = end_BT & (nth_1T < taken_B[:, None])
        taken_B = jnp.where(end_BT.any(1), jnp.argmax(end_BT, 1).astype(jnp.int32) + 1, taken_B)
        place_BT = jnp.where(nth_1T < taken_B[:, None], first_B[:, None] + nth_1T, FAR)
        tokens_BS = text.tokens_BS.at[rows_B[:, None], place_BT].set(
            new_BT, mode="drop", out_sharding=spec("batch", "time")
        )
        seen_BV = text.seen_BV
        for t in range(G + 1):
            seen_BV = jnp.where((t < taken_B)[:, None], with_token(seen_BV, new_BT[:, t]), seen_BV)
        lengths_B = first_B + taken_B
        done_B = text.done_B | end_BT.any(1) | (lengths_B >= limits_B)
        text = Text(tokens_BS, lengths_B, done_B, text.logits_BV, seen_BV, cache)
        proposed_B = proposed_B + jnp.minimum(room_B, G)
        accepted_B = accepted_B + jnp.minimum(standing_B, taken_B)
        return count + 1, Speculation(text, draft_cache, proposed_B, accepted_B)

    def unfinished(carry: tuple[jax.Array, Speculation]) -> jax.Array:
        return (carry[0] < rounds) & ~carry[1].text.done_B.all()

    return jax.lax.while_loop(unfinished, step, (jnp.int32(0), state))[1]


def at(x_BX: jax.Array, index_B: jax.Array) -> jax.Array:
    """Of each row the entry at its index, [B, ...]. A sum, not a lookup: it needs no layout to be named."""
    here_BX = jnp.arange(x_BX.shape[1], dtype=jnp.int32)[None] == index_B[:, None]
    return jnp.where(here_BX.reshape(here_BX.shape + (1,) * (x_BX.ndim - 2)), x_BX, 0).sum(1, dtype=x_BX.dtype)


def last(text: Text) -> jax.Array:
    """Each row's last token, int32 [B]."""
    return at(text.tokens_BS, text.lengths_B - 1)


def of(p_BGV: jax.Array, tokens_BG: jax.Array) -> jax.Array:
    """The probabilities of these tokens, [B, G]."""
    here_BGV = jnp.arange(p_BGV.shape[2], dtype=jnp.int32)[None, None] == tokens_BG[:, :, None]
    return jnp.where(here_BGV, p_BGV, 0).sum(2)


def with_token(seen_BV: jax.Array, new_B: jax.Array) -> jax.Array:
    """Which tokens are in the text with one more (nothing where that is not kept: [B, 0])."""
    return seen_BV | (new_B[:, None] == jnp.arange(seen_BV.shape[1])[None])


def instead(p_BTV: jax.Array, q_BGV: jax.Array, standing_B: jax.Array) -> jax.Array:
    """What the token after those that stand is drawn from, [B, V]: what p has above q; p where all of them stand."""
    above_BTV = jnp.maximum(p_BTV - jnp.pad(q_BGV, ((0, 0), (0, 1), (0, 0))), 0)
    p_BV, above_BV = at(p_BTV, standing_B), at(above_BTV, standing_B)
    # Nothing above: p and q are equal but for rounding.
    return jnp.where(above_BV.any(-1, keepdims=True), above_BV, p_BV)


def draw(weights_BV: jax.Array, keys_B: jax.Array) -> jax.Array:
    """A token of each row with a chance in proportion to its weight, int32 [B]."""
    return jax.vmap(jax.random.categorical)(keys_B, jnp.log(weights_BV)).astype(jnp.int32)
