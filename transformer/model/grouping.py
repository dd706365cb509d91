"""A product of many rows with several matrices, each of which has its own share of the rows, however large.

M rows, in the order of their matrices; E matrices of I inputs by O outputs; b rows at a time.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from transformer.parallel.mesh import platform

ROWS = 128


def ragged_product(x_MI: jax.Array, w_EIO: jax.Array, count_E: jax.Array) -> jax.Array:
    """The first count_0 rows times matrix 0, the next count_1 times matrix 1, ..., [M, O]. Rows behind the last of
    these must be zero, and what is given for them has no meaning.

    On a CPU XLA multiplies every row with every matrix and masks; there the rows are worked through in blocks instead.
    """
    if platform() != "cpu":
        return jax.lax.ragged_dot(x_MI, w_EIO, count_E)
    return by_blocks(*alike(x_MI, w_EIO, count_E))


def alike(*arrays: jax.Array) -> list[jax.Array]:
    """In a shard_map, all said to differ along every axis that any of them does; else as they are. A gradient by one of
    them that was the same everywhere is then added up over those axes."""
    own: Any = [jax.typeof(x).manual_axis_type.varying for x in arrays]
    missing = [tuple(frozenset().union(*own) - axes) for axes in own]
    return [jax.lax.pcast(x, axes, to="varying") if axes else x for x, axes in zip(arrays, missing, strict=True)]


@jax.custom_vjp
def by_blocks(x_MI: jax.Array, w_EIO: jax.Array, count_E: jax.Array) -> jax.Array:
    """``ragged_product`` by products of ``ROWS`` rows with one matrix, one after the other."""
    b = min(ROWS, len(x_MI))
    x_MI = _longer(x_MI, b)

    def visit(e: jax.Array, first: jax.Array, end: jax.Array, y_MO: jax.Array) -> jax.Array:
        # Rows of a block that are another matrix's are written again by the blocks after this one.
        y_bO = jax.lax.dynamic_slice_in_dim(x_MI, first, b) @ w_EIO[e]
        return jax.lax.dynamic_update_slice_in_dim(y_MO, y_bO, first, 0)

    like = jax.ShapeDtypeStruct((len(x_MI), w_EIO.shape[2]), x_MI.dtype)
    return _each_block(b, count_E, visit, like)[:-b]


def _forward(x_MI: jax.Array, w_EIO: jax.Array, count_E: jax.Array) -> Any:
    return by_blocks(x_MI, w_EIO, count_E), (x_MI, w_EIO, count_E)


def _backward(kept: Any, slope_MO: jax.Array) -> Any:
    x_MI, w_EIO, count_E = kept
    b = min(ROWS, len(x_MI))
    long_MI, long_MO = _longer(x_MI, b), _longer(slope_MO, b)

    def visit(e: jax.Array, first: jax.Array, end: jax.Array, slope_EIO: jax.Array) -> jax.Array:
        own_b1 = (first + jnp.arange(b) < end)[:, None]
        slope_bO = jnp.where(own_b1, jax.lax.dynamic_slice_in_dim(long_MO, first, b), 0)
        found_IO = jnp.einsum(
            "bI,bO->IO", jax.lax.dynamic_slice_in_dim(long_MI, first, b), slope_bO, preferred_element_type=jnp.float32
        )
        return slope_EIO.at[e].add(found_IO)

    slope_EIO = _each_block(b, count_E, visit, jax.ShapeDtypeStruct(w_EIO.shape, jnp.float32))
    used_M1 = (jnp.arange(len(x_MI)) < count_E.sum())[:, None]
    slope_MI = by_blocks(jnp.where(used_M1, slope_MO, 0), w_EIO.swapaxes(1, 2), count_E)
    return slope_MI, slope_EIO.astype(w_EIO.dtype), None


by_blocks.defvjp(_forward, _backward)


def _longer(x_MI: jax.Array, b: int) -> jax.Array:
    """With ``b`` rows of zeros more, so that no block reaches over the end."""
    return jnp.pad(x_MI, ((0, b), (0, 0)))


def _each_block(b: int, count_E: jax.Array, visit: Callable[..., jax.Array], like: Any) -> jax.Array:
    """``visit(matrix, first row, end of the matrix's rows, result so far)`` for each block in turn; zeros at first."""
    end_E = jnp.cumsum(count_E)
    blocks_E = -(-count_E // b)
    last_E = jnp.cumsum(blocks_E)

    def body(j: jax.Array, result: jax.Array) -> jax.Array:
        e = (j >= last_E).sum()
        first = end_E[e] - count_E[e] + (j - last_E[e] + blocks_E[e]) * b
        return visit(e, first, end_E[e], result)

    start, _ = alike(jnp.zeros(like.shape, like.dtype), count_E)
    return jax.lax.fori_loop(0, last_E[-1], body, start)
