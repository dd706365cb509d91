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
    table = spec("batch", "kv_heads", None, "time", None)
    # The small operands are transposed, so that both products run over rows in memory order and the
    # tables never move; and the mask is written out once (the barrier), not in every pass over a table.
    q_BKGTH = q_BTKGH.transpose(0, 2, 3, 1, 4) * q_BTKGH.shape[-1] ** -0.5
    k_BKHS, v_BKSH = k_BSKH.transpose(0, 2, 3, 1), v_BSKH.transpose(0, 2, 1, 3)
    visible_B11TS = mask.visible_BTS()[:, None, None]
    hidden_B11TS = jax.lax.optimization_barrier(jnp.where(visible_B11TS, 0.0, -BIG))
    scores_BKGTS = jnp.einsum(
        "BKGTH,BKHS->BKGTS", q_BKGTH, k_BKHS, preferred_element_type=jnp.float32, out_sharding=table
    )
    weights_BKGTS = jax.nn.softmax(scores_BKGTS + hidden_B11TS, axis=-1).astype(v_BSKH.dtype)
    mixed_BKGTH = jnp.einsum("BKGTS,BKSH->BKGTH", weights_BKGTS, v_BKSH, out_sharding=table)
    mixed_BTKGH = mixed_BKGTH.transpose(0, 3, 1, 2, 4)
    return jnp.where(visible_B11TS.any(-1).transpose(0, 3, 1, 2)[..., None], mixed_BTKGH, 0)
