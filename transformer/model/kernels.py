"""The table of attention kernels: what each one can do, and the plain one, the reference for all others.

B rows, T query positions, S key positions, K key/value heads, G query heads per key/value head,
H width of one head.
"""

import dataclasses
from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from transformer.errors import UserError
from transformer.model import fused
from transformer.model.blockwise import KEPT, blockwise
from transformer.model.masks import BIG, Mask
from transformer.parallel import context
from transformer.parallel.mesh import platform
from transformer.parallel.rules import put, spec

Name = Literal["auto", "plain", "blockwise", "cudnn", "splash"]
SHORT = 128  # so few keys that the table of scores is no bill


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


def one_query(q_BTKGH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, mask: Mask) -> jax.Array:
    """``plain`` for a single query (T is 1), [B, T, K, G, H]: keys and values stay where the cache has them."""
    q_BKGH = q_BTKGH[:, 0] * q_BTKGH.shape[-1] ** -0.5
    k_BKSH, v_BKSH = k_BSKH.transpose(0, 2, 1, 3), v_BSKH.transpose(0, 2, 1, 3)
    layout = spec("batch", "kv_heads", None, None)
    visible_BS = mask.visible_BTS()[:, 0]
    scores_BKSG = jnp.einsum("BKSH,BKGH->BKSG", k_BKSH, q_BKGH, preferred_element_type=jnp.float32, out_sharding=layout)
    scores_BKGS = scores_BKSG.transpose(0, 1, 3, 2) + jnp.where(visible_BS, 0.0, -BIG)[:, None, None]
    weights_BKGS = jax.nn.softmax(scores_BKGS, axis=-1).astype(v_BSKH.dtype)
    mixed_BKGH = jnp.einsum("BKGS,BKSH->BKGH", weights_BKGS, v_BKSH, out_sharding=layout)
    return jnp.where(visible_BS.any(-1)[:, None, None, None], mixed_BKGH, 0)[:, None]


@dataclasses.dataclass(frozen=True)
class Call:
    """What is asked of a kernel, all known before anything runs."""

    platform: str  # cpu, gpu, tpu
    queries: int
    keys: int
    head_width: int
    dtype: str
    ordered: bool  # query t and key t are both at index t
    packed: bool  # with segments


class Kernel(NamedTuple):
    """``run(q, k, v, mask)`` on one device's share; ``objection(call)`` says why it cannot, or None.

    ``linear`` is whether its memory is linear in the context.
    """

    run: Callable[[jax.Array, jax.Array, jax.Array, Mask], jax.Array]
    objection: Callable[[Call], str | None]
    linear: bool


KERNELS: dict[str, Kernel] = {
    "splash": Kernel(fused.splash, fused.splash_objection, True),
    "cudnn": Kernel(fused.cudnn, fused.cudnn_objection, True),
    "blockwise": Kernel(blockwise, lambda call: None, True),
    "plain": Kernel(plain, lambda call: None, False),
}


def choose(name: str, call: Call) -> tuple[str, str]:
    """The kernel for a call and why it is that one. UserError where the one that was asked for cannot do it.

    A single query's scores are one row, whatever the context: there the plain kernel serves every choice.
    """
    if call.queries == 1:
        return "plain", "a single query has no table"
    if name != "auto":
        if objection := KERNELS[name].objection(call):
            raise UserError(f"config.model.attention.kernel: {name} cannot be used here: {objection}; auto can")
        return name, "as configured"
    objections = []
    for candidate, kernel in KERNELS.items():
        if candidate == "blockwise" and call.keys <= SHORT:
            objections.append(f"blockwise: {call.keys} keys are few")
        elif objection := kernel.objection(call):
            objections.append(f"{candidate}: {objection}")
        else:
            return candidate, "; ".join(["auto", *objections])
    raise AssertionError("the plain kernel can do everything")


def choose_for_training(name: str, context: int, head_width: int, dtype: str) -> tuple[str, str]:
    """The kernel that packed rows of a whole context are trained with on the mesh's devices, and why it is that one."""
    return choose(name, Call(platform(), context, context, head_width, dtype, ordered=True, packed=True))


def attend(name: str, q_BTKGH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, mask: Mask) -> jax.Array:
    """Attention by the kernel called ``name``, each device on its own rows and heads: [B, T, K, G, H]."""
    call = Call(
        platform=platform(),
        queries=q_BTKGH.shape[1],
        keys=k_BSKH.shape[1],
        head_width=q_BTKGH.shape[-1],
        dtype=str(q_BTKGH.dtype),
        ordered=mask.ordered,
        packed=mask.query_segment_BT is not None,
    )
    chosen, _ = choose(name, call)
    run = one_query if call.queries == 1 else KERNELS[chosen].run
    if jax.sharding.get_abstract_mesh().empty:
        return run(q_BTKGH, k_BSKH, v_BSKH, mask)

    def names(x_BT: jax.Array, positions: str | None) -> tuple[str | None, str | None]:
        return "batch" if x_BT.shape[0] == q_BTKGH.shape[0] else None, positions

    # Who is seen is known everywhere: indices and segments of keys are gathered over the context axis.
    masks = mask.each(lambda x_BT: spec(*names(x_BT, "time")), lambda x_BS: spec(*names(x_BS, None)))
    mask = mask.each(lambda x_BT: put(x_BT, *names(x_BT, "time")), lambda x_BS: put(x_BS, *names(x_BS, None)))
    if chosen == "plain":  # einsums alone, which the mesh understands
        k_BSKH, v_BSKH = (put(x_BSKH, "batch", None, "kv_heads", "head_width") for x_BSKH in (k_BSKH, v_BSKH))
        return run(q_BTKGH, k_BSKH, v_BSKH, mask)

    def gathered(q_BTKGH: jax.Array, k_BTKH: jax.Array, v_BTKH: jax.Array, mask: Mask) -> jax.Array:
        k_BSKH, v_BSKH = (jax.lax.all_gather(x, context.AXIS, axis=1, tiled=True) for x in (k_BTKH, v_BTKH))
        return KERNELS[chosen].run(q_BTKGH, k_BSKH, v_BSKH, mask)

    if context.devices() > 1:  # the backward pass gathers anew, so that no device keeps whole rows of every block
        run = jax.checkpoint(gathered, policy=jax.checkpoint_policies.save_only_these_names(KEPT))
    query, key = ("batch", "time", "kv_heads", None, "head_width"), ("batch", "time", "kv_heads", "head_width")
    queries, keys = spec(*query), spec(*key)
    q_BTKGH, k_BSKH, v_BSKH = put(q_BTKGH, *query), put(k_BSKH, *key), put(v_BSKH, *key)
    # Every input that has a gradient is cut over every axis that the kernel's result is, so none needs a sum.
    return jax.shard_map(run, in_specs=(queries, keys, keys, masks), out_specs=queries, check_vma=False)(
        q_BTKGH, k_BSKH, v_BSKH, mask
    )
