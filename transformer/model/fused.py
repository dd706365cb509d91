"""Kernels that others wrote for one kind of machine, behind the one signature of `kernels`.

B rows, T query positions, S key positions, K key/value heads, G query heads per key/value head,
H width of one head, N query heads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from transformer.model.masks import Mask
from transformer.model.scores import Scoring

if TYPE_CHECKING:
    from transformer.model.kernels import Call

SPLASH_BLOCKS = (512, 256, 128)


def cudnn_objection(call: Call) -> str | None:
    if call.platform != "gpu":
        return f"it is for GPUs, this is {call.platform}"
    if call.packed:
        return "it knows no segments"
    if call.dtype not in ("bfloat16", "float16"):
        return f"it computes in 16 bits, not {call.dtype}"
    if not call.ordered or call.queries != call.keys or call.window or call.chunk:
        return "it masks whole rows alone"
    if call.value_width not in (None, call.head_width):
        return "it needs values as wide as keys"
    if call.head_width % 8 or call.head_width > 128:
        return f"it needs a head width that is a multiple of 8 up to 128, not {call.head_width}"
    return None


def cudnn(q_BTKGH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, mask: Mask, how: Scoring) -> jax.Array:
    """cuDNN's flash attention through JAX; causal rows without segments, 16 bits."""
    B, T, K, G, H = q_BTKGH.shape
    q_BTNH = q_BTKGH.reshape(B, T, K * G, H)
    mixed_BTNH = jax.nn.dot_product_attention(q_BTNH, k_BSKH, v_BSKH, is_causal=True, implementation="cudnn")
    return mixed_BTNH.reshape(q_BTKGH.shape)


def splash_objection(call: Call) -> str | None:
    if call.platform != "tpu":
        return f"it is for TPUs, this is {call.platform}"
    if not call.ordered or call.queries != call.keys or call.chunk:
        return "it masks whole rows and windows alone"
    if call.queries % SPLASH_BLOCKS[-1]:
        return f"it needs a context that is a multiple of {SPLASH_BLOCKS[-1]}, not {call.queries}"
    return None


def splash_block(context: int) -> int:
    """How many queries, and how many keys, are worked through at once."""
    return next(size for size in SPLASH_BLOCKS if context % size == 0)


def splash_pairs(context: int, window: int | None) -> int:
    """How many pairs of a query and a key of one row are worked through: whole blocks, where any key is seen."""
    block = splash_block(context)
    first = [0 if window is None else max(0, start - window + 1) // block for start in range(0, context, block)]
    return block**2 * sum(i - j + 1 for i, j in enumerate(first))


def splash_products(key_width: int, value_width: int, forward: int) -> int:
    """Multiply-adds of a pair in a training step that goes forward so often. Backward there are seven products: scores
    and the slopes of weights twice, for keys and values and for queries, and the slopes of each of the three."""
    return forward * (key_width + value_width) + 4 * key_width + 3 * value_width


def splash(
    q_BTKGH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, mask: Mask, how: Scoring, interpret: bool = False
) -> jax.Array:
    """JAX's own Pallas kernel for TPUs, forward and backward, with segments; blocks that the mask hides are skipped."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernel
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    B, T, _, G, H = q_BTKGH.shape
    block = splash_block(T)
    names = ("block_q", "block_kv", "block_kv_compute", "block_q_dkv", "block_kv_dkv", "block_kv_dkv_compute")
    blocks: Any = dict.fromkeys((*names, "block_q_dq", "block_kv_dq"), block)
    sizes = kernel.BlockSizes(**blocks)
    seen = masks.CausalMask((T, T)) if mask.window is None else masks.LocalMask((T, T), (mask.window - 1, 0), 0)
    one = kernel.make_splash_mqa_single_device(
        masks.MultiHeadMask([seen] * G), block_sizes=sizes, attn_logits_soft_cap=how.soft_cap, interpret=interpret
    )
    segments_BT = mask.query_segment_BT
    if segments_BT is None:
        segments_BT = jnp.ones((1, T), jnp.int32)
    segments_BT = jnp.broadcast_to(segments_BT, (B, T))
    q_BKGTH = q_BTKGH.transpose(0, 2, 3, 1, 4) * np.asarray(H**-0.5, q_BTKGH.dtype)
    k_BKSH, v_BKSH = k_BSKH.transpose(0, 2, 1, 3), v_BSKH.transpose(0, 2, 1, 3)

    def row(q: jax.Array, k: jax.Array, v: jax.Array, segments_T: jax.Array) -> jax.Array:
        ids = kernel.SegmentIds(segments_T, segments_T)
        return jax.vmap(lambda q, k, v: one(q, k, v, segment_ids=ids))(q, k, v)

    mixed_BKGTH = jax.vmap(row)(q_BKGTH, k_BKSH, v_BKSH, segments_BT)
    # To the kernel padding is a segment like any other; here it sees nothing.
    return jnp.where((segments_BT > 0)[:, :, None, None, None], mixed_BKGTH.transpose(0, 3, 1, 2, 4), 0)
