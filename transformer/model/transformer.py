"""The whole model on one page: token ids in, a score for every next token out.

Letters: B rows, T positions, D model width, V vocabulary, L blocks.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from transformer.model import attention
from transformer.model.block import Block, dropout
from transformer.model.cache import View
from transformer.model.config import Model
from transformer.model.layers import by_declaration, product, weight
from transformer.model.masks import Mask
from transformer.model.norms import Norm
from transformer.model.positions import POSITIONS, lookup
from transformer.parallel.rules import spec


class Transformer(nn.Module):
    """Decoder-only, pre-norm: arXiv:1706.03762 in the form of the GPT-2 report.

    ``apply({"params": params}, tokens_BT, positions_BT, mask)`` gives (logits_BTV in float32, None).
    With a ``cache`` and the ``places_BT`` where this call's keys and values go, the second result
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
        places_BT: jax.Array | None = None,
        only_B: jax.Array | None = None,
        head: Callable[[jax.Array, jax.Array], Any] | None = None,
    ) -> tuple[Any, Any]:
        c, V = self.config, self.vocab_size
        dtype = jnp.dtype(c.dtype)

        with jax.named_scope("embed"):
            table = (V, c.width), ("vocab", "width")
            embedding_VD = weight(self, "embedding", *table, role="embedding", std=c.init_std)
            x_BTD = lookup(embedding_VD, tokens_BT)
            signal = POSITIONS[type(c.positions)](c, name="positions")(positions_BT)
            if signal.added_BTD is not None:
                x_BTD = x_BTD + signal.added_BTD
            x_BTD = dropout(self, x_BTD.astype(dtype), c.dropout, self.train)

        x_BTD, cache = self.blocks(x_BTD, mask, signal.rotation, cache, places_BT)

        if only_B is not None:
            rows_B = jnp.arange(only_B.shape[0])
            x_BTD = x_BTD.at[rows_B, only_B].get(out_sharding=spec("batch", "stream"))[:, None]

        with jax.named_scope("unembed"):
            if c.final_norm:
                # Where memory is short no float32 copy is kept through the loss, when most is in memory at once.
                norm = Norm if c.remat == "none" else nn.remat(Norm)
                x_BTD = norm(c, name="final_norm")(x_BTD)
            unembedding_VD = embedding_VD
            if not c.tie_embeddings:
                unembedding_VD = weight(self, "unembedding", *table, role="unembedding", std=c.init_std)
            return (head or logits)(x_BTD, unembedding_VD), cache

    def blocks(self, x_BTD: jax.Array, mask: Mask, rotation: Any, cache: Any, places_BT: Any) -> tuple[jax.Array, Any]:
        """The stack of L blocks. Their weights lie stacked along a first dimension, scanned or unrolled."""
        c = self.config
        block = Block(c, self.train, parent=None)
        if self.is_initializing():
            key = self.make_rng("params")
            one = jax.eval_shape(block.init, key, x_BTD, mask, rotation)
            stacked = jax.vmap(lambda i: block.init(jax.random.fold_in(key, i), x_BTD, mask, rotation)["params"])
            self.put_variable("params", "blocks", stacked(jnp.arange(c.depth)))
            self.put_variable("declarations", "blocks", by_declaration(lambda w: w.stack(c.depth), one["declarations"]))
        params_L: Any = self.get_variable("params", "blocks")
        drop = self.make_rng("dropout") if self.train and c.dropout else None

        def apply(x_BTD: jax.Array, one: Any, params: Any, i: Any) -> Any:
            view = None if one is None else View(one, places_BT)
            rngs = {} if drop is None else {"dropout": jax.random.fold_in(drop, i)}
            return block.apply({"params": params}, x_BTD, mask, rotation, view, rngs=rngs)

        if c.remat != "none":
            apply = jax.checkpoint(apply, policy=_POLICIES[c.remat], static_argnums=(3,) if c.unrolled else ())
        if c.unrolled:
            caches = []
            for i in range(c.depth):
                x_BTD, one = apply(x_BTD, cache and cache[i], block_weights(params_L, i), i)
                caches.append(one)
            return x_BTD, cache and tuple(caches)

        def scanned(carry: Any, block: Any) -> Any:
            (x_BTD, cache), (params, i) = carry, block
            x_BTD, one = apply(x_BTD, jax.tree.map(lambda old: old[i], cache), params, i)
            put = jax.lax.dynamic_update_index_in_dim
            return (x_BTD, jax.tree.map(lambda old, new: put(old, new, i, 0), cache, one)), None

        return jax.lax.scan(scanned, (x_BTD, cache), (params_L, jnp.arange(c.depth)))[0]


def empty_cache(config: Model, rows: int, places: int) -> Any:
    """What generation remembers, before anything was read: a cache for each block, in a tuple or, scanned, stacked."""
    one = attention.kind(config).allocate(config, rows, places)
    if config.unrolled:
        return (one,) * config.depth
    return jax.tree.map(lambda x: jnp.broadcast_to(x[None], (config.depth, *x.shape)), one)


def block_weights(params_L: Any, i: int) -> Any:
    """The weights of block ``i`` of those that lie stacked, or of a tuple with each block's own."""
    return params_L[i] if isinstance(params_L, tuple) else jax.tree.map(lambda w: w[i], params_L)


def unstack(config: Model, params: Any) -> Any:
    """Weights for a loop around the model: an unrolled stack is taken apart once, not anew in every round."""
    if not config.unrolled:
        return params
    blocks = tuple(block_weights(params["blocks"], i) for i in range(config.depth))
    return jax.lax.optimization_barrier({**params, "blocks": blocks})


def logits(x_BTD: jax.Array, unembedding_VD: jax.Array) -> jax.Array:
    """A score for every next token, float32 [B, T, V]."""
    V = unembedding_VD.shape[0]
    return product(x_BTD, unembedding_VD.T, (V,), ("batch", "time", "vocab"), jnp.float32)


_POLICIES = {
    "full": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.dots_saveable,
    "dots_without_batch": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}
