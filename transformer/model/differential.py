"""Differential attention: what two softmax maps have in common cancels, as noise does in a differential amplifier.

Differential Transformer, arXiv:2410.05258, section 2.1. Queries and keys of a head are two halves of width P = H/2:

    head = (softmax(q1 k1 / sqrt(P)) - l softmax(q2 k2 / sqrt(P))) v
    l = exp(a1 b1) - exp(a2 b2) + l0,   l0 = 0.8 - 0.6 exp(-0.3 (number of the block, from 0))
    result = (1 - l0) norm(head), the norm over each head

with the same weights in queries, keys and values as multi-head attention of as many heads. a and b are learned, of
width P, for all heads of a block.

B rows, T query positions, D model width, N heads, H width of one head (of its values), P of its queries and keys.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from transformer.errors import UserError
from transformer.model import cache, grouped, kernels, spans
from transformer.model.heads import HeadNorm, back, learned_scoring, placed, project, scoring_weights
from transformer.model.layers import weight
from transformer.model.masks import Mask
from transformer.model.place import FIRST, Place, residual_weights, values
from transformer.model.scores import Scoring
from transformer.parallel.rules import spec
from transformer.settings import settings

if TYPE_CHECKING:
    from transformer.model.config import Model


@settings
class Differential(grouped.MultiHead):
    """Each head is the difference of two maps of scores, the second times a learned number. arXiv:2410.05258."""


class DifferentialAttention(nn.Module):
    config: Model
    normed = True  # its heads, behind `mix`: only proportions of their weights count

    @nn.compact
    def __call__(
        self,
        x_BTD: jax.Array,
        mask: Mask,
        rotation: Any = None,
        view: cache.View | None = None,
        place: Place = FIRST,
    ) -> tuple[jax.Array, Any]:
        c = self.config
        N, H = c.heads, c.head_size
        q_BTNH, k_BTNH = project(c, x_BTD, "query", N), project(c, x_BTD, "key", N, "kv_heads")
        v_BTNH = values(self, c, x_BTD, N, place)
        B, T = x_BTD.shape[:2]
        halves, whole = (B, T, 2 * N, H // 2), (B, T, N, H)
        layout = spec("batch", "time", "heads", "head_width")
        q_BTMP, k_BTMP = (jax.lax.reshape(x, halves, out_sharding=layout) for x in (q_BTNH, k_BTNH))
        q_BTMP, k_BTMP = placed(c, q_BTMP, k_BTMP, rotation)  # each half on its own
        q_BTNH, k_BTNH = (jax.lax.reshape(x, whole, out_sharding=layout) for x in (q_BTMP, k_BTMP))

        new_cache, k_BSNH, v_BSNH = None, k_BTNH, v_BTNH
        mask = dataclasses.replace(mask, **spans.limits(c.attention.span))
        if view is not None:
            new_cache, k_BSNH, v_BSNH, mask = cache.extend(view, k_BTNH, v_BTNH, mask, spans.reach(c.attention.span))
        how = learned_scoring(self, c, N)  # both maps have the head's sink and distances

        start = initial(place.number % c.depth)
        difference_BTNH = self.mix(q_BTNH, k_BSNH, v_BSNH, mask, how, self.learned() + start)
        normed_BTNH = (1 - start) * HeadNorm(c, "heads", "head", name="norm")(difference_BTNH)
        return back(c, normed_BTNH.astype(x_BTD.dtype), x_BTD), new_cache

    def mix(self, q_BTNH: jax.Array, k_BSNH: jax.Array, v_BSNH: jax.Array, mask: Mask, how: Scoring, by: Any) -> Any:
        """What the first map takes from the values less ``by`` times what the second does, float32 [B, T, N, H]."""
        half = q_BTNH.shape[-1] // 2

        def mixed(part: slice) -> jax.Array:
            q_BTN1P, k_BSNP = q_BTNH[:, :, :, None, part], k_BSNH[..., part]
            return kernels.attend(self.config.attention.kernel, q_BTN1P, k_BSNP, v_BSNH, mask, how)[:, :, :, 0]

        return mixed(slice(0, half)).astype(jnp.float32) - by * mixed(slice(half, 2 * half))

    def learned(self) -> jax.Array:
        """What is learned of the number that the second map is multiplied by."""
        shape = (4, self.config.head_size // 2)
        a1_P, b1_P, a2_P, b2_P = weight(self, "lambda", shape, ("group", "head_width"), role="bias", std=0.1)
        return jnp.exp((a1_P * b1_P).sum()) - jnp.exp((a2_P * b2_P).sum())


def initial(number: jax.Array | int) -> jax.Array:
    """That number where learning starts, in block ``number`` (0, 1, ...)."""
    return 0.8 - 0.6 * jnp.exp(-0.3 * jnp.asarray(number, jnp.float32))


def check(c: Model) -> None:
    if c.head_size % 2:
        raise UserError(
            f"config.model.attention.projection: differential attention halves heads, and their width is "
            f"{c.head_size}; set config.model.head_width to an even number"
        )


def rest(c: Model) -> int:
    N, H = c.heads, c.head_size
    normed = {"none": 0, "head": 2 * H // 2, "width": 2 * N * H}[c.attention.qk_norm]
    own = 4 * H // 2 + H  # lambda, and the norm over heads
    return own + normed + scoring_weights(c) + residual_weights(c) + grouped.biases(c)
