"""The whole model on one page: token ids in, a score for every next token out.

Letters: B rows, T positions, D model width, V vocabulary, L blocks.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from transformer.model import attention, parametrisation
from transformer.model.block import Block, dropout
from transformer.model.cache import View, in_int8
from transformer.model.config import Model
from transformer.model.layers import PRODUCT, by_declaration, product, weight
from transformer.model.masks import Mask
from transformer.model.norms import Norm
from transformer.model.place import Place, first_values
from transformer.model.positions import POSITIONS, lookup
from transformer.model.scores import capped
from transformer.model.spans import has_chunks, period, widened
from transformer.parallel.rules import spec


class Transformer(nn.Module):
    """Decoder-only, pre-norm: arXiv:1706.03762 in the form of the GPT-2 report.

    ``apply({"params": params}, tokens_BT, positions_BT, mask)`` gives (logits_BTV in float32, None).
    ``counted_BT``, how much each token counts, is for a mixture of experts, which then puts how it spread them into the
    collection "routing" (it needs ``mutable=["routing"]``).
    With a ``cache`` and the ``index_BT`` of these tokens in their texts (`cache.View`), the second result
    is the updated cache. With ``only_B`` the logits are those of one position of each row, [B, 1, V].
    ``train`` turns dropout on (it needs ``rngs={"dropout": key}``). The first result is what ``head`` makes of
    the normed stream and the unembedding: the logits, or in training the loss, which need not hold them all.
    """

    config: Model
    vocab_size: int
    train: bool = False

    @nn.compact
    def __call__(
        self,
        tokens_BT: jax.Array,
        positions_BT: jax.Array,
        mask: Mask,
        cache: Any = None,
        index_BT: jax.Array | None = None,
        only_B: jax.Array | None = None,
        counted_BT: jax.Array | None = None,
        head: Callable[[jax.Array, jax.Array], Any] | None = None,
    ) -> tuple[Any, Any]:
        c, V = self.config, self.vocab_size
        dtype = jnp.dtype(c.dtype)

        with jax.named_scope("embed"):
            table = (V, c.width), ("vocab", "width")
            embedding_VD = weight(self, "embedding", *table, role="embedding", std=c.init_std)
            x_BTD = lookup(embedding_VD, tokens_BT)
            if c.scale_embedding:
                x_BTD = x_BTD * c.width**0.5
            signal = POSITIONS[type(c.positions)](c, name="positions")(positions_BT)
            blocks = [c.block(i) for i in range(period(c.attention.span))]
            rotations = tuple(
                signal.rotation
                if block.positions == c.positions
                else POSITIONS[type(block.positions)](block)(positions_BT).rotation
                for block in blocks
            )
            if signal.added_BTD is not None:
                x_BTD = x_BTD + signal.added_BTD
            x_BTD = dropout(self, x_BTD.astype(dtype), c.dropout, self.train)
            x_BTD = Norm(c, name="embedding_norm")(x_BTD) if c.norms == "peri" else x_BTD

        if cache is None and has_chunks(c.attention.span):  # counted in the text, not in the row it was packed into
            mask = dataclasses.replace(mask, query_position_BT=positions_BT, key_position_BS=positions_BT)
        x_BTD, cache = self.blocks(x_BTD, mask, rotations, cache, index_BT, counted_BT)

        if only_B is not None:
            rows_B = jnp.arange(only_B.shape[0])
            x_BTD = x_BTD.at[rows_B, only_B].get(out_sharding=spec("batch", "stream"))[:, None]

        with jax.named_scope("unembed"):
            if c.final_norm:
                # Where memory is short no float32 copy is kept through the loss, when most is in memory at once.
                norm = Norm if c.remat == "none" else nn.remat(Norm)
                x_BTD = norm(c, name="final_norm")(x_BTD)
            x_BTD = parametrisation.times(x_BTD, parametrisation.before_logits(c))
            unembedding_VD = embedding_VD
            if not c.tie_embeddings:
                unembedding_VD = weight(self, "unembedding", *table, role="unembedding", std=c.init_std)
            return (head or functools.partial(logits, cap=c.logits_soft_cap))(x_BTD, unembedding_VD), cache

    def blocks(
        self, x_BTD: jax.Array, mask: Mask, rotations: Any, cache: Any, index_BT: Any, counted_BT: Any
    ) -> tuple[jax.Array, Any]:
        """The stack of L blocks, gone through once or in loops. Their weights lie stacked along a first dimension,
        scanned or unrolled. What is scanned is one period of the pattern: the settings of its blocks differ."""
        c, p = self.config, period(self.config.attention.span)
        pattern = [Block(c.block(i), self.train, parent=None) for i in range(p)]
        if self.is_initializing():
            key, block, rotation = self.make_rng("params"), pattern[0], rotations[0]
            one = jax.eval_shape(block.init, key, x_BTD, mask, rotation)
            stacked = jax.vmap(lambda i: block.init(jax.random.fold_in(key, i), x_BTD, mask, rotation)["params"])
            self.put_variable("params", "blocks", stacked(jnp.arange(c.depth)))
            self.put_variable("declarations", "blocks", by_declaration(lambda w: w.stack(c.depth), one["declarations"]))
        params_L: Any = self.get_variable("params", "blocks")
        first_BTKH = first_values(c, block_weights(params_L, 0), x_BTD)
        drop = self.make_rng("dropout") if self.train and (c.dropout or c.layer_drop) else None

        def apply(x_BTD: jax.Array, one: Any, params: Any, i: Any, at: int | None) -> Any:
            # Taken out of the stack in here: the backward pass keeps the stack and no copies of its blocks.
            params, j = (params, 0) if at is None else (block_weights(params, at), at % p)
            view = None if one is None else View(one, index_BT)
            rngs = {} if drop is None else {"dropout": jax.random.fold_in(drop, i)}
            given = (x_BTD, mask, rotations[j], view, Place(i, first_BTKH), counted_BT)
            (y_BTD, new), told = pattern[j].apply({"params": params}, *given, rngs=rngs, mutable=["routing"])
            if drop is not None and c.layer_drop:
                kept = jax.random.bernoulli(jax.random.fold_in(jax.random.fold_in(drop, i), 1), 1 - c.layer_drop)
                y_BTD, told = jnp.where(kept, y_BTD, x_BTD), jax.tree.map(lambda x: jnp.where(kept, x, 0), told)
            return y_BTD, new, told

        if c.remat != "none":
            static = (3, 4) if c.unrolled else (4,)
            apply = jax.checkpoint(apply, policy=_POLICIES[c.remat], static_argnums=static)
        places = list(range(c.depth * c.loops))  # of blocks on the way, each with a cache of its own
        routed = []  # what blocks tell of their routing, in their order
        if c.unrolled:
            caches = []
            for i in places:
                x_BTD, one, told = apply(x_BTD, cache and cache[i], params_L, i, i % c.depth)
                caches.append(one)
                routed.append(jax.tree.map(lambda x: x[None], told))
            self.tell(routed)
            return x_BTD, cache and tuple(caches)

        n = c.depth // p  # whole periods; the blocks after them are written out

        def scanned(carry: Any, unit: Any) -> Any:
            (x_BTD, cache), (params, i, first) = carry, unit
            new, told = [], []
            for j in range(p):
                here = jax.tree.map(lambda old: old[i], cache and cache[j])
                x_BTD, there, one = apply(x_BTD, here, params, first + j, None if p == 1 else j)
                new.append(there)
                told.append(one)
            put = jax.lax.dynamic_update_index_in_dim
            cache = jax.tree.map(lambda old, one: put(old, one, i, 0), cache, cache and tuple(new))
            return (x_BTD, cache), jax.tree.map(lambda *x: jnp.stack(x), *told)

        units = params_L if p == 1 else jax.tree.map(lambda w: w[: n * p].reshape(n, p, *w.shape[1:]), params_L)
        caches = []
        for loop in range(c.loops):
            first = loop * c.depth
            old, rest = cache[loop] if cache else (None, (None,) * (c.depth - n * p))
            # Its place on the way comes with the weights: JAX keeps what it traced of ``scanned`` for all loops.
            places_n = first + p * jnp.arange(n)
            (x_BTD, new), told = jax.lax.scan(scanned, (x_BTD, old), (units, jnp.arange(n), places_n))
            routed.append(jax.tree.map(lambda x: x.reshape(n * p, *x.shape[2:]), told))
            last = []
            for i in range(n * p, c.depth):
                x_BTD, one, told = apply(x_BTD, rest[i - n * p], params_L, first + i, i)
                last.append(one)
                routed.append(jax.tree.map(lambda x: x[None], told))
            caches.append((new, tuple(last)))
        self.tell(routed)
        return x_BTD, cache and tuple(caches)

    def tell(self, routed: list[Any]) -> None:
        """Pass on what the blocks tell of their routing, along a first dimension of all that were gone through."""
        if jax.tree.leaves(routed):
            found = jax.tree.map(lambda *x: jnp.concatenate(x), *routed)
            self.put_variable("routing", "blocks", found["routing"]["mlp"]["sums"])


def empty_cache(config: Model, rows: int, places: int, int8: bool = False, ahead: int = 0) -> Any:
    """What generation remembers, before anything was read: a cache for each block that is gone through, in a tuple; or,
    scanned, for each loop a tuple of those of a period's blocks, stacked, and one of those of the blocks after them.

    ``ahead`` is how many tokens may be written and turned down again (see `model.cache`).
    """
    c, p = config, period(config.attention.span)

    def one(i: int) -> Any:
        empty = attention.kind(c).allocate(widened(c.block(i), ahead), rows, places)
        return in_int8(empty) if int8 else empty

    if c.unrolled:
        return tuple(one(i) for i in range(c.depth)) * c.loops
    n = c.depth // p
    stacked = tuple(jax.tree.map(lambda x: jnp.broadcast_to(x[None], (n, *x.shape)), one(j)) for j in range(p))
    return ((stacked, tuple(one(i) for i in range(n * p, c.depth))),) * c.loops


def block_weights(params_L: Any, i: int) -> Any:
    """The weights of block ``i`` of those that lie stacked, or of a tuple with each block's own."""
    return params_L[i] if isinstance(params_L, tuple) else jax.tree.map(lambda w: w[i], params_L)


def unstack(config: Model, params: Any) -> Any:
    """Weights for a loop around the model: an unrolled stack is taken apart once, not anew in every round."""
    if not config.unrolled:
        return params
    blocks = tuple(block_weights(params["blocks"], i) for i in range(config.depth))
    return jax.lax.optimization_barrier({**params, "blocks": blocks})


def logits(x_BTD: jax.Array, unembedding_VD: jax.Array, cap: float | None = None) -> jax.Array:
    """A score for every next token, float32 [B, T, V], held below ``cap``."""
    V = unembedding_VD.shape[0]
    logits_BTV = product(x_BTD, unembedding_VD.T, (V,), ("batch", "time", "vocab"), jnp.float32)
    return logits_BTV if cap is None else capped(logits_BTV, cap)[0]


def _products_or(policy: Any) -> Any:
    """Also what is a product by name: a policy does not see into a function with a gradient of its own."""
    named = jax.checkpoint_policies.save_only_these_names(PRODUCT)
    return jax.checkpoint_policies.save_from_both_policies(policy, named)


_POLICIES = {
    "full": jax.checkpoint_policies.nothing_saveable,
    "dots": _products_or(jax.checkpoint_policies.dots_saveable),
    "dots_without_batch": _products_or(jax.checkpoint_policies.dots_with_no_batch_dims_saveable),
}
