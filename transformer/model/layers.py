"""Weights, each declared once, and the einsum layer that uses them.

A declaration carries all that others need to know of a weight: its shape, its logical axes
(layout), its role (decay, optimizer, parametrisation) and how it is initialised. `declarations()`
reads them back from a model without computing anything.

B rows, T positions; of a product R rows times positions, I inputs, O outputs.
"""

import dataclasses
import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name

from transformer.parallel import context
from transformer.parallel.mesh import platform
from transformer.parallel.rules import merge, spec

PRODUCT = "product"  # by this name rematerialisation knows a product that is a function of our own
Role = Literal["embedding", "position", "matrix", "residual", "unembedding", "bias", "scale"]


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, kw_only=True)
class Weight:
    """What is known of one weight. ``inputs`` counts the dimensions behind the ``copies`` that are summed over."""

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    role: Role
    inputs: int = 0
    stacked: bool = False  # has one copy per block along its first dimension

    @property
    def copies(self) -> int:
        """How many leading dimensions only count weights of one kind: those of blocks and of experts."""
        return sum(axis in ("block", "expert") for axis in self.axes)

    def stack(self, depth: int) -> "Weight":
        """The same weight of ``depth`` blocks, along a new first dimension."""
        return dataclasses.replace(self, shape=(depth, *self.shape), axes=("block", *self.axes), stacked=True)


def weight(
    module: nn.Module,
    name: str,
    shape: tuple[int, ...],
    axes: tuple[str, ...],
    *,
    role: Role,
    std: float,
    inputs: int = 0,
) -> jax.Array:
    """Declare a weight of ``module`` and return it, float32: normal with ``std``, ones (scale), zeros (bias, std 0)."""
    if role == "scale":
        init = nn.initializers.ones
    elif role == "bias" and not std:
        init = nn.initializers.zeros
    else:
        init = nn.initializers.normal(std)
    if module.is_initializing():
        declared = Weight(shape=shape, axes=axes, role=role, inputs=inputs)
        module.put_variable("declarations", name, declared)
    layout = spec(*axes)
    return module.param(name, functools.partial(init, out_sharding=layout) if layout else init, shape, jnp.float32)


class Einsum(nn.Module):
    """``einsum(equation, x, w)`` plus an optional bias, in ``x``'s dtype with float32 weights cast to it.

    The equation is written where the layer is used. The weight's letters start with those it sums
    over (its inputs); the bias has the others. ``out`` names the result's logical axes.
    """

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    out: tuple[str, ...]
    std: float
    bias: bool = False
    role: Role = "matrix"

    @nn.compact
    def __call__(self, equation: str, x: jax.Array) -> jax.Array:
        operands, result = equation.split("->")
        _, letters = operands.split(",")
        inputs = sum(letter not in result for letter in letters)
        assert operands == f"{result[:2]}{letters[:inputs]},{letters}" and result[2:] == letters[inputs:], equation
        w = weight(self, "w", self.shape, self.axes, role=self.role, std=self.std, inputs=inputs)
        y = product(x, merge(w, inputs), self.shape[inputs:], self.out)
        if self.bias:
            outputs = self.shape[inputs:]
            b = weight(self, "b", outputs, self.out[-len(outputs) :], role="bias", std=0.0)  # lies as the result does
            y = y + b.reshape((1,) * (y.ndim - b.ndim) + b.shape).astype(x.dtype)
        return y


def product(
    x: jax.Array, w_IO: jax.Array, outputs: tuple[int, ...], out: tuple[str, ...], dtype: Any = None
) -> jax.Array:
    """``x`` [B, T, ...] times a matrix, [B, T, *outputs], laid out by the names ``out``; in ``x``'s dtype or ``dtype``.

    As a product of two matrices, B T rows by I inputs and I by O outputs: with separate dimensions XLA
    writes transposed copies for the weight's gradient (docs/log.md has what that costs). Rows that are cut over
    their positions too cannot be merged without moving them.
    """
    B, T = x.shape[:2]
    w_IO = w_IO.astype(x.dtype)
    if context.devices() > 1:
        layout = spec(out[0], out[1], out[2:])
        y = jnp.einsum("BTI,IO->BTO", merge(x, 1, 1), w_IO, preferred_element_type=dtype, out_sharding=layout)
    elif x.dtype == jnp.bfloat16 and platform() == "cpu":
        y = checkpoint_name(_on_cpu(*_alike(merge(x, 2), w_IO), dtype or x.dtype, spec(out[:2], out[2:])), PRODUCT)
    else:
        layout = spec(out[:2], out[2:])
        y = jnp.einsum("RI,IO->RO", merge(x, 2), w_IO, preferred_element_type=dtype, out_sharding=layout)
    return jax.lax.reshape(y, (B, T, *outputs), out_sharding=spec(*out))


def _alike(*arrays: jax.Array) -> list[jax.Array]:
    """In a shard_map: all declared to differ along the same mesh axes, so that gradients are added up over the rest."""
    own = [jax.typeof(x).manual_axis_type.varying for x in arrays]
    more = [tuple(frozenset[str]().union(*own) - axes) for axes in own]
    return [jax.lax.pcast(x, axes, to="varying") if axes else x for x, axes in zip(arrays, more, strict=True)]


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _on_cpu(x_RI: jax.Array, w_IO: jax.Array, dtype: Any, layout: Any) -> jax.Array:
    """A product of bfloat16 matrices, forward and backward with float32 results that are rounded after: where results
    are to be bfloat16 themselves, XLA on a CPU widens both matrices first and is half as fast (docs/log.md). The
    slopes of a float32 result are rounded to bfloat16 too. There are no forward-mode derivatives."""
    y = jnp.einsum("RI,IO->RO", x_RI, w_IO, preferred_element_type=jnp.float32, out_sharding=layout)
    return y.astype(dtype)


def _on_cpu_forward(x_RI: jax.Array, w_IO: jax.Array, dtype: Any, layout: Any) -> Any:
    return _on_cpu(x_RI, w_IO, dtype, layout), (x_RI, w_IO)


def _on_cpu_backward(dtype: Any, layout: Any, kept: Any, slope_RO: jax.Array) -> Any:
    x_RI, w_IO = kept
    slope_RO = slope_RO.astype(x_RI.dtype)
    layouts = [jax.typeof(x).sharding.spec if layout is not None else None for x in kept]
    by_x = jnp.einsum("RO,IO->RI", slope_RO, w_IO, preferred_element_type=jnp.float32, out_sharding=layouts[0])
    by_w = jnp.einsum("RI,RO->IO", x_RI, slope_RO, preferred_element_type=jnp.float32, out_sharding=layouts[1])
    return by_x.astype(x_RI.dtype), by_w.astype(w_IO.dtype)


_on_cpu.defvjp(_on_cpu_forward, _on_cpu_backward)


def declared_leaves(declared: Any) -> dict[str, Weight]:
    """Declarations by parameter path ("blocks/attention/query/w")."""
    flat = jax.tree_util.tree_flatten_with_path(declared, is_leaf=lambda x: isinstance(x, Weight))[0]
    return {"/".join(str(key.key) for key in path): leaf for path, leaf in flat}


def by_declaration(function: Any, declared: Any, *trees: Any) -> Any:
    """``function(Weight, leaf, ...)`` over every parameter, with its declaration first."""
    return jax.tree.map(function, declared, *trees, is_leaf=lambda x: isinstance(x, Weight))
