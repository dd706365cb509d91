"""Multi-head latent attention: keys and values are widened from one short vector, which is all that a cache keeps.

DeepSeek-V2, arXiv:2405.04434, section 2.1. With h the block's input at one position:

    c = W_c h (normed: section 3.1.2)       queries  q = W_q h, or W_q c' of a short vector c' = W_c' h of their own
    k = W_k c,   v = W_v c                  rotary   k_r = rot(W_r h) for all heads, q_r = rot(W_qr h or c') for each
    weights = softmax((q k + q_r k_r) / sqrt(H + R))

Many queries: keys and values of every head are written out. One query: W_k goes to its side and W_v behind the mix,
so a step costs C multiply-adds per key and head, and the cache is read as it lies.

B rows, T query positions, S key positions, D model width, N heads, H width of one head without its rotary part,
R width of the rotary part, W of both, C width of the latent vector, Q width of what queries are made of,
K key heads of the cache: one.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from transformer.errors import UserError
from transformer.model import cache, kernels, spans
from transformer.model.heads import Mixing, back, learned_scoring, scoring_weights
from transformer.model.layers import Einsum, product, weight
from transformer.model.masks import Mask
from transformer.model.norms import LayerNorm, Norm
from transformer.model.place import FIRST, Place
from transformer.model.positions import Rotary, rotate
from transformer.model.scores import Scoring
from transformer.model.spans import Pattern
from transformer.parallel.rules import merge, put, spec
from transformer.settings import settings

if TYPE_CHECKING:
    from transformer.model.config import Model


@settings
class Latent:
    """Keys and values are widened from one short vector of each position. arXiv:2405.04434, section 2.1."""

    kv_rank: int = 64  # C
    q_rank: int | None = None  # Q; none: queries come from the stream itself
    rope_width: int = 16  # R; rotary positions alone have it
    norm: bool = True  # of the short vectors, by the model's norm


class LatentAttention(Mixing):
    @nn.compact
    def __call__(
        self,
        x_BTD: jax.Array,
        mask: Mask,
        rotation: Any = None,
        view: cache.View | None = None,
        place: Place = FIRST,
    ) -> tuple[jax.Array, Any]:
        c, own = self.config, settings_of(self.config)
        N, H, C, R = c.heads, c.head_size, own.kv_rank, rotary(c)

        def shortened(name: str, width: int, normed: bool) -> jax.Array:
            out = ("batch", "time", "latent")
            layer = Einsum((c.width, width), ("width", "latent"), out, c.init_std, c.bias, name=f"{name}_down")
            y_BTC = layer("BTD,DC->BTC", x_BTD)
            return Norm(c, name=f"{name}_norm")(y_BTC) if normed else y_BTC

        # Queries, with and without positions.
        source, inputs, axis = x_BTD, c.width, "width"
        if own.q_rank is not None:
            source, inputs, axis = shortened("query", own.q_rank, own.norm), own.q_rank, "rank"
        heads = ("batch", "time", "heads", "head_width")
        layer = Einsum((inputs, N, H + R), (axis, "heads", "head_width"), heads, c.init_std, c.bias, name="query")
        q_BTNH, q_BTNR = jnp.split(layer("BTQ,QNH->BTNH", source), (H,), axis=-1)

        # What is kept of a position: the short vector, as one key, and its rotary key, as one value.
        c_BT1C = shortened("key_value", C, own.norm)[:, :, None]
        r_BT1R = c_BT1C[..., :0]
        if R:
            q_BTNR = rotate(q_BTNR, rotation)
            r_BT1R = rotate(shortened("key_rotary", R, False)[:, :, None], rotation)
        new_cache, c_BS1C, r_BS1R = None, c_BT1C, r_BT1R
        mask = dataclasses.replace(mask, **spans.limits(c.attention.span))
        if view is not None:
            new_cache, c_BS1C, r_BS1R, mask = cache.extend(view, c_BT1C, r_BT1R, mask, spans.reach(c.attention.span))

        # No biases of their own: that of the short vector goes through them, and a single query could not take them.
        axes, how = ("rank", "heads", "head_width"), learned_scoring(self, c, N)
        k_CNH = weight(self, "key", (C, N, H), axes, role="matrix", std=c.init_std, inputs=1)
        v_CNH = weight(self, "value", (C, N, H), axes, role="matrix", std=c.init_std, inputs=1)
        if view is not None and x_BTD.shape[1] == 1:
            mixed_BTNH = absorbed(q_BTNH, q_BTNR, c_BS1C[:, :, 0], r_BS1R[:, :, 0], k_CNH, v_CNH, mask, how)
        else:
            k_BSNH, v_BSNH = (product(c_BS1C[:, :, 0], merge(w, 1), (N, H), heads) for w in (k_CNH, v_CNH))
            r_BSNR = put(jnp.broadcast_to(r_BS1R, (*k_BSNH.shape[:3], R)), *heads)
            k_BSNW, q_BTNW = (jnp.concatenate(x, axis=-1) for x in ((k_BSNH, r_BSNR), (q_BTNH, q_BTNR)))
            attended_BTN1H = self.mix(q_BTNW[:, :, :, None], k_BSNW, v_BSNH, mask, how)
            mixed_BTNH = attended_BTN1H[:, :, :, 0]
        return back(c, mixed_BTNH, x_BTD), new_cache


def absorbed(
    q_BTNH: jax.Array,
    q_BTNR: jax.Array,
    c_BSC: jax.Array,
    r_BSR: jax.Array,
    k_CNH: jax.Array,
    v_CNH: jax.Array,
    mask: Mask,
    how: Scoring,
) -> jax.Array:
    """What a single query mixes (T is 1), [B, T, N, H]: k_C q in place of every key, v_C behind the mix of latents."""
    layout, (H, R), dtype = spec("batch", "heads", None), (q_BTNH.shape[-1], q_BTNR.shape[-1]), q_BTNH.dtype
    q_BNC = jnp.einsum("BNH,CNH->BNC", q_BTNH[:, 0], k_CNH.astype(dtype), out_sharding=layout)

    def scores(q_BNC: jax.Array, k_BSC: jax.Array) -> jax.Array:
        return jnp.einsum("BNC,BSC->BNS", q_BNC, k_BSC, preferred_element_type=jnp.float32, out_sharding=layout)

    scores_BNS = (scores(q_BNC, c_BSC) + scores(q_BTNR[:, 0], r_BSR)) * (H + R) ** -0.5
    weights_BNS = kernels.weights_of_one(scores_BNS[:, :, None], mask, how)[:, :, 0].astype(dtype)
    c_BNC = jnp.einsum("BNS,BSC->BNC", weights_BNS, c_BSC, out_sharding=layout)
    return jnp.einsum("BNC,CNH->BNH", c_BNC, v_CNH.astype(dtype), out_sharding=layout)[:, None]


def settings_of(c: Model) -> Latent:
    assert isinstance(c.attention.projection, Latent)
    return c.attention.projection


def rank(c: Model) -> int:
    return settings_of(c).kv_rank


def rotary(c: Model) -> int:
    """R: 0 where positions are not rotary."""
    return settings_of(c).rope_width if isinstance(c.positions, Rotary) else 0


def check(c: Model) -> None:
    """UserError for sizes that cannot be built, and for what keys that are never written out cannot have."""
    own, where = settings_of(c), "config.model.attention"
    for name, size in (("kv_rank", own.kv_rank), ("q_rank", own.q_rank), ("rope_width", own.rope_width)):
        if size is not None and size < 1:
            raise UserError(f"{where}.projection.{name}: {size} is too small, set 1 or more")
    if c.attention.qk_norm != "none":
        raise UserError(
            f"{where}.qk_norm: latent attention writes out no keys to norm when it generates; set none, "
            f"attention.projection.norm norms what they are made of"
        )
    if c.attention.value_residual != "none":
        raise UserError(f"{where}.value_residual: latent attention keeps no values to mix with others; set none")
    span = c.attention.span
    if isinstance(span, Pattern) and not span.rotate_global and isinstance(c.positions, Rotary):
        raise UserError(
            f"{where}.span.rotate_global: false would leave blocks of latent attention without their rotary part, "
            f"and the blocks' weights of unlike shapes; set true"
        )


def allocate(c: Model, rows: int, places: int) -> cache.KeyValues:
    """Of each position the short vector, as the key of one head, and the rotary key, as its value."""
    places = min(places, spans.reach(c.attention.span) or places)
    keys, values = (cache.allocate(rows, places, 1, width, c.dtype) for width in (rank(c), rotary(c)))
    return cache.KeyValues(keys.k_BKSH, values.v_BKSH)


def matrices(c: Model) -> int:
    own, D, N, H, R = settings_of(c), c.width, c.heads, c.head_size, rotary(c)
    queries = N * (H + R) * D if own.q_rank is None else own.q_rank * (D + N * (H + R))
    widened = 2 * own.kv_rank * N * H
    return queries + (own.kv_rank + R) * D + widened + (2 if c.attention.gate else 1) * N * H * D


def rest(c: Model) -> int:
    own, N, H, R = settings_of(c), c.heads, c.head_size, rotary(c)
    shortened = own.kv_rank + (own.q_rank or 0)
    shift = c.bias and isinstance(c.norm, LayerNorm)
    norms = shortened * (2 if shift else 1) if own.norm else 0
    gate = N * H if c.attention.gate else 0
    biases = shortened + R + N * (H + R) + gate + c.width if c.bias else 0
    return norms + scoring_weights(c) + biases
