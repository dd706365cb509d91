"""Watch a model at work: what each of its parts gives, without a line about it in the model.

Flax lets one see and change the calls of modules (`flax.linen.intercept_methods`). Attention weights are never kept by
fast kernels; here the method ``mix`` of a kind of attention is asked again with the same queries and keys and the plain
kernel, with unit vectors for values: what a head then mixes is its weights.

B rows, T query positions, S key positions, D model width, N heads, K key/value heads, G query heads per key/value head,
H width of one head, V vocabulary, P blocks that are gone through (a stack in loops counts each time).
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from transformer.config import Experiment
from transformer.errors import UserError
from transformer.model.block import Block
from transformer.model.masks import causal
from transformer.model.positions import Signal
from transformer.model.transformer import Transformer
from transformer.parallel.rules import put
from transformer.settings import tag_of

Call = Callable[..., Any]


class Passed(NamedTuple):
    """One block: what it did. All float32."""

    weights_BNTS: jax.Array  # how much of key S's value query T takes, in each head; see `attention_weights`
    attention_BTD: jax.Array  # what attention adds to the stream (after norms and factors of the branch, if any)
    mlp_BTD: jax.Array  # what the MLP adds
    stream_BTD: jax.Array  # the stream behind the block


class Seen(NamedTuple):
    """One pass through the model. All float32."""

    added_BTD: jax.Array | None  # position vectors; None where positions are no vectors
    start_BTD: jax.Array  # the stream before the first block
    blocks_P: tuple[Passed, ...]
    normed_BTD: jax.Array  # behind the final norm


def written_out(experiment: Experiment) -> Transformer:
    """The model with its blocks one after the other and the plain kernel, which does not change what it says."""
    model = experiment.model
    attention = dataclasses.replace(model.attention, kernel="plain")
    return Transformer(
        dataclasses.replace(model, attention=attention, stack="unroll", remat="none"), experiment.vocab_size
    )


def look(experiment: Experiment, params: Any, tokens_BT: jax.Array) -> Seen:
    """What the parts of the model give while it reads whole rows. For use inside ``jax.jit``.

    UserError for a kind of attention without a method ``mix``.
    """
    added: list[jax.Array | None] = []
    starts: list[jax.Array] = []
    blocks: list[Passed] = []
    weights: list[jax.Array] = []
    branches: dict[str, jax.Array] = {}

    def watch(call: Call, args: Any, kwargs: Any, context: nn.module.InterceptorContext) -> Any:
        module, method = context.module, context.method_name
        if isinstance(module, Block) and method == "__call__":
            weights.clear()
            branches.clear()
            given = call(*args, **kwargs)
            if not weights:
                kind = tag_of(type(experiment.model.attention.projection))
                raise UserError(
                    f"config.model.attention.projection: {kind} has no method mix(queries, keys, values, ...), so no "
                    "weights of one position for another can be shown"
                )
            starts.append(_float32(args[0]))
            blocks.append(
                Passed(jnp.concatenate(weights, axis=1), branches["attention"], branches["mlp"], _float32(given[0]))
            )
            return given
        given = call(*args, **kwargs)
        if method == "mix":
            mix = functools.partial(call, **kwargs)
            weights.append(attention_weights(mix, *args, normed=getattr(module, "normed", False)))
        if isinstance(module, Block) and method == "after":
            branch, x_BTD, made_BTD = args
            # A norm behind the sum changes all of the stream: there it is what comes before the sum.
            post = module.config.norms == "post"
            branches[branch] = _float32(made_BTD) if post else _float32(given) - _float32(x_BTD)
        if isinstance(given, Signal):
            added.append(given.added_BTD)
        return given

    with nn.intercept_methods(watch):
        normed_BTD, _ = _apply(experiment, params, tokens_BT, lambda x_BTD, _: x_BTD)
    [added_BTD] = added
    return Seen(added_BTD, starts[0], tuple(blocks), _float32(normed_BTD))


def attention_weights(
    mix: Call, q: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, *more: Any, normed: bool
) -> jax.Array:
    """What ``mix`` weighs the values with, float32 [B, N, T, S]; ``v`` is only looked at for its shape.

    Weights may be below zero where they come from a difference or have no softmax. Where the heads are ``normed``
    behind the mix, only their proportions count: the magnitudes of each row are made to sum to one.
    """
    B, S, K, _ = v_BSKH.shape
    unit_BSKS = jnp.broadcast_to(jnp.eye(S, dtype=jnp.float32)[None, :, None], (B, S, K, S))
    layout = ("batch", None, "kv_heads", "head_width")
    mixed = mix(q, put(k_BSKH, *layout), put(unit_BSKS, *layout), *more)
    mixed_BTNS = (mixed[0] if isinstance(mixed, tuple) else mixed).reshape(B, q.shape[1], -1, S)
    if normed:
        total_BTN1 = jnp.abs(mixed_BTNS).sum(-1, keepdims=True)
        mixed_BTNS = mixed_BTNS / jnp.where(total_BTN1 > 0, total_BTN1, 1)
    return mixed_BTNS.transpose(0, 2, 1, 3)


def end(experiment: Experiment, params: Any, stream_BTD: jax.Array) -> jax.Array:
    """The model's own end (final norm, unembedding, cap) of any stream: float32 logits [B, T, V]. Inside ``jax.jit``.

    Of the stream behind block k that is the logit lens: what the model would say if it stopped there
    (nostalgebraist, "interpreting GPT: the logit lens", 2020).
    """

    def skip(call: Call, args: Any, kwargs: Any, context: nn.module.InterceptorContext) -> Any:
        if isinstance(context.module, Block) and context.method_name == "__call__":
            return stream_BTD.astype(experiment.model.dtype), None
        return call(*args, **kwargs)

    nothing_BT = jnp.zeros(stream_BTD.shape[:2], jnp.int32)
    with nn.intercept_methods(skip):
        logits_BTV: jax.Array = _apply(experiment, params, nothing_BT)[0]
    return logits_BTV


def _apply(experiment: Experiment, params: Any, tokens_BT: jax.Array, head: Call | None = None) -> Any:
    B, T = tokens_BT.shape
    index_BT = put(jnp.tile(jnp.arange(T, dtype=jnp.int32), (B, 1)), "batch", "time")
    model = written_out(experiment)
    return model.apply({"params": params}, put(tokens_BT, "batch", "time"), index_BT, causal(T), head=head)


def _float32(x: jax.Array) -> jax.Array:
    return x.astype(jnp.float32)
