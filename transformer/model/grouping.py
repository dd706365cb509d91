"""A product of many rows with many matrices, where each matrix has its own, unequal share of the rows.

M rows, in the order of their matrices; E matrices of I inputs by O outputs.
"""

import jax


def ragged_product(x_MI: jax.Array, w_EIO: jax.Array, count_E: jax.Array) -> jax.Array:
    """The first count_0 rows times matrix 0, the next count_1 times matrix 1, ..., [M, O]. What rows behind the last
    of these give is not defined, and they must be zero."""
    return jax.lax.ragged_dot(x_MI, w_EIO, count_E)
