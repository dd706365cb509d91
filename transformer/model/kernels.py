"""Attention kernels. The plain one writes out the score table and is the reference for all others.

B rows, T query positions, S key positions, K key/value heads, G query heads per key/value head,
H width of one head.
"""

import jax
import jax.numpy as jnp

from transformer.model.masks import Mask
from transformer.parallel.rules import spec

BIG = 1e30  # finite, so that a row without any visible key cannot make a NaN


def plain(q_BTKGH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, mask: Mask) -> jax.Array:
    """softmax(q k^T / sqrt(H)) v with the whole n x n table in memory, [B, T, K, G, H].

    Scaled dot-product attention, arXiv:1706.03762, equation 1; scores and softmax in float32. A
    query that sees no key gets zeros, and zero gradients.
    """
    table = ("batch", "kv_heads", None, "time", None)
    q_BTKGH = q_BTKGH * q_BTKGH.shape[-1] ** -0.5
    scores_BKGTS = jnp.einsum(
        "BTKGH,BSKH->BKGTS", q_BTKGH, k_BSKH, preferred_element_type=jnp.float32, out_sharding=spec(*table)
    )
    visible_B11TS = mask.visible_BTS()[:, None, None]
    scores_BKGTS = jnp.where(visible_B11TS, scores_BKGTS, -BIG)
    largest_BKGT1 = jax.lax.stop_gradient(scores_BKGTS.max(-1, keepdims=True))
    weights_BKGTS = jnp.where(visible_B11TS, jnp.exp(scores_BKGTS - largest_BKGT1), 0.0)
    total_BKGT1 = weights_BKGTS.sum(-1, keepdims=True)
    weights_BKGTS = weights_BKGTS / jnp.where(total_BKGT1 > 0, total_BKGT1, 1.0)
    out = ("batch", "time", "kv_heads", None, None)
    return jnp.einsum("BKGTS,BSKH->BTKGH", weights_BKGTS.astype(v_BSKH.dtype), v_BSKH, out_sharding=spec(*out))
