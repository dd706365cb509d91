"""The table of attention kernels: what each one can do, and the plain one, the reference for all others.

B rows, T query positions, S key positions, K key/value heads, G query heads per key/value head,
H width of one head.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from transformer.errors import UserError
from transformer.model import fused
from transformer.model.blockwise import KEPT, blockwise
from transformer.model.masks import BIG, Mask
from transformer.model.scores import NOTHING, OPTIONS, Scoring, adjusted, weights
from transformer.parallel import context
from transformer.parallel.mesh import platform
from transformer.parallel.rules import each_device, put, spec

Name = Literal["auto", "plain", "blockwise", "cudnn", "splash"]
SHORT = 128  # so few keys that the table of scores is no bill
FEW = 16  # so few queries: blocks of them would be mostly empty


def plain(q_BTKGH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, mask: Mask, how: Scoring = NOTHING) -> jax.Array:
    """softmax(q k^T / sqrt(H)) v, or what ``how`` asks for, with the whole n x n table in memory, [B, T, K, G, H].

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
    scores_BKGTS = adjusted(scores_BKGTS, how, mask.distance_BTS()) + hidden_B11TS
    weights_BKGTS = weights(scores_BKGTS, how).astype(v_BSKH.dtype)
    mixed_BKGTH = jnp.einsum("BKGTS,BKSH->BKGTH", weights_BKGTS, v_BKSH, out_sharding=table)
    mixed_BTKGH = mixed_BKGTH.transpose(0, 3, 1, 2, 4)
    return jnp.where(visible_B11TS.any(-1).transpose(0, 3, 1, 2)[..., None], mixed_BTKGH, 0)


def one_query(
    q_BTKGH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, mask: Mask, how: Scoring = NOTHING
) -> jax.Array:
    """``plain`` for a single query (T is 1), [B, T, K, G, H]: keys and values stay where the cache has them."""
    q_BKGH = q_BTKGH[:, 0] * q_BTKGH.shape[-1] ** -0.5
    k_BKSH, v_BKSH = k_BSKH.transpose(0, 2, 1, 3), v_BSKH.transpose(0, 2, 1, 3)
    layout = spec("batch", "kv_heads", None, None)
    scores_BKSG = jnp.einsum("BKSH,BKGH->BKSG", k_BKSH, q_BKGH, preferred_element_type=jnp.float32, out_sharding=layout)
    weights_BKGS = weights_of_one(scores_BKSG.transpose(0, 1, 3, 2), mask, how).astype(v_BSKH.dtype)
    mixed_BKGH = jnp.einsum("BKGS,BKSH->BKGH", weights_BKGS, v_BKSH, out_sharding=layout)
    return mixed_BKGH[:, None]


def weights_of_one(scores_BKGS: jax.Array, mask: Mask, how: Scoring) -> jax.Array:
    """The weights of a single query's scores, float32 [B, K, G, S]; zeros where it sees no key."""
    visible_BS = mask.visible_BTS()[:, 0]
    scores_BKG1S = adjusted(scores_BKGS[:, :, :, None], how, mask.distance_BTS())
    scores_BKG1S = scores_BKG1S + jnp.where(visible_BS, 0.0, -BIG)[:, None, None, None]
    weights_BKGS = weights(scores_BKG1S, how)[:, :, :, 0]
    return jnp.where(visible_BS.any(-1)[:, None, None, None], weights_BKGS, 0)


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
    window: int | None = None
    chunk: int | None = None
    options: tuple[str, ...] = ()  # of scoring
    value_width: int | None = None  # where it is not that of queries and keys


class Kernel(NamedTuple):
    """``run(q, k, v, mask, how)`` on one device's share; ``objection(call)`` says why it cannot, or None.

    ``options`` are those of scoring that it knows; ``linear`` is whether its memory is linear in the context.
    """

    run: Callable[..., jax.Array]
    objection: Callable[[Call], str | None]
    linear: bool
    options: tuple[str, ...] = ()

    def lacks(self, options: Sequence[str]) -> str | None:
        """The first of the options that it does not know."""
        return next((option for option in options if option not in self.options), None)

    def refuses(self, call: Call) -> str | None:
        """Why it cannot serve this call, or None."""
        unknown = self.lacks(call.options)
        return f"it knows no {unknown}" if unknown else self.objection(call)


KERNELS: dict[str, Kernel] = {
    "splash": Kernel(fused.splash, fused.splash_objection, True, ("a soft cap",)),
    "cudnn": Kernel(fused.cudnn, fused.cudnn_objection, True),
    "blockwise": Kernel(blockwise, lambda call: None, True, ("sinks", "ALiBi", "a soft cap")),
    "plain": Kernel(plain, lambda call: None, False, OPTIONS),
}


def choose(name: str, call: Call) -> tuple[str, str]:
    """The kernel for a call and why it is that one. UserError where the one that was asked for cannot do it.

    A single query's scores are one row, whatever the context: there the plain kernel serves every choice.
    """
    if call.queries == 1:
        return "plain", "a single query has no table"
    if name != "auto":
        if objection := KERNELS[name].refuses(call):
            raise UserError(f"config.model.attention.kernel: {name} cannot be used here: {objection}; auto can")
        return name, "as configured"
    objections = []
    for candidate, kernel in KERNELS.items():
        if candidate == "blockwise" and call.keys <= SHORT:
            objections.append(f"blockwise: {call.keys} keys are few")
        elif candidate == "blockwise" and call.queries <= FEW:
            objections.append(f"blockwise: {call.queries} queries are few")
        elif objection := kernel.refuses(call):
            objections.append(f"{candidate}: {objection}")
        else:
            return candidate, "; ".join(["auto", *objections])
    raise AssertionError("the plain kernel can do everything")


def attend(
    name: str, q_BTKGH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, mask: Mask, how: Scoring = NOTHING
) -> jax.Array:
    """Attention by the kernel called ``name``, each device on its own rows and heads: [B, T, K, G, H]."""
    call = Call(
        platform=platform(),
        queries=q_BTKGH.shape[1],
        keys=k_BSKH.shape[1],
        head_width=q_BTKGH.shape[-1],
        dtype=str(q_BTKGH.dtype),
        ordered=mask.ordered,
        packed=mask.query_segment_BT is not None,
        window=mask.window,
        chunk=mask.chunk,
        options=how.options,
        value_width=v_BSKH.shape[-1],
    )
    chosen, _ = choose(name, call)
    run = one_query if call.queries == 1 else KERNELS[chosen].run
    if jax.sharding.get_abstract_mesh().empty:
        return run(q_BTKGH, k_BSKH, v_BSKH, mask, how)

    def names(x_BT: jax.Array, positions: str | None) -> tuple[str | None, str | None]:
        return "batch" if x_BT.shape[0] == q_BTKGH.shape[0] else None, positions

    # Who is seen is known everywhere: indices and segments of keys are gathered over the context axis.
    masks = mask.each(lambda x_BT: spec(*names(x_BT, "time")), lambda x_BS: spec(*names(x_BS, None)))
    mask = mask.each(lambda x_BT: put(x_BT, *names(x_BT, "time")), lambda x_BS: put(x_BS, *names(x_BS, None)))
    if chosen == "plain":  # einsums alone, which the mesh understands
        k_BSKH, v_BSKH = (put(x_BSKH, "batch", None, "kv_heads", "head_width") for x_BSKH in (k_BSKH, v_BSKH))
        return run(q_BTKGH, k_BSKH, v_BSKH, mask, how)

    def gathered(q_BTKGH: jax.Array, k_BTKH: jax.Array, v_BTKH: jax.Array, mask: Mask, how: Scoring) -> jax.Array:
        k_BSKH, v_BSKH = (jax.lax.all_gather(x, context.AXIS, axis=1, tiled=True) for x in (k_BTKH, v_BTKH))
        return KERNELS[chosen].run(q_BTKGH, k_BSKH, v_BSKH, mask, how)

    if context.devices() > 1:  # the backward pass gathers anew, so that no device keeps whole rows of every block
        run = jax.checkpoint(gathered, policy=jax.checkpoint_policies.save_only_these_names(KEPT))
    query, key = ("batch", "time", "kv_heads", None, "head_width"), ("batch", "time", "kv_heads", "head_width")
    queries, keys = spec(*query), spec(*key)
    q_BTKGH, k_BSKH, v_BSKH = put(q_BTKGH, *query), put(k_BSKH, *key), put(v_BSKH, *key)
    heads = jax.tree.map(lambda x_KG: spec("kv_heads", None), how)
    # Queries, keys and values are cut over every axis that the kernel's result is, so their gradients need no sum.
    return each_device(run, in_specs=(queries, keys, keys, masks, heads), out_specs=queries, check_vma=False)(
        q_BTKGH, k_BSKH, v_BSKH, mask, how
    )
