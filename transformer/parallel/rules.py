"""Logical axes -> mesh axes: the one table that says how every array is laid out.

The model names logical axes only ("width", "heads", ...). Changing a layout means changing a row
here, never the model. Mesh axes are explicit (`jax.sharding.AxisType.Explicit`), so a wrong layout
is an error while tracing, also on one device, where the mesh is a mesh of ones.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

from transformer.errors import UserError

RULES: dict[str, tuple[str, ...]] = {
    "batch": ("slice", "data", "fsdp", "expert"),  # rows of a batch
    "time": ("context",),  # positions of a row, in the order of parallel.context
    "stream": (),  # the residual stream's width in activations
    "width": ("fsdp",),  # the residual stream's width in weights
    "vocab": ("tensor",),
    "heads": ("tensor",),  # query heads
    "kv_heads": ("tensor",),  # key/value heads, and the query groups that share them
    "group": (),  # query heads that share a key/value head
    "head_width": (),
    "latent": (),  # what keys, values or queries were shortened to, in activations
    "rank": ("fsdp",),  # the same in the weights that widen it
    "mlp": ("tensor",),
    "expert": ("expert",),  # experts of a mixture
    "candidate": (),  # experts as a router scores them, all for each token
    "position": (),
    "block": (),  # stacked blocks
}


Name = str | None | tuple[str, ...]  # of one dimension; several names where dimensions were merged into it


def mesh_axes(name: Name) -> tuple[str, ...]:
    """The mesh axes of one dimension, without those that a shard_map has taken. An undeclared name is an error."""
    if name is None:
        return ()
    if isinstance(name, tuple):
        return tuple(axis for part in name for axis in mesh_axes(part))
    if name not in RULES:
        raise KeyError(f"logical axis {name!r} has no row in transformer/parallel/rules.py")
    return tuple(axis for axis in RULES[name] if axis not in taken())


def taken() -> tuple[str, ...]:
    """The mesh axes that a shard_map around has taken, where there are others; none on one device's share."""
    mesh = jax.sharding.get_abstract_mesh()
    return () if mesh.are_all_axes_manual else tuple(mesh.manual_axes)


def meshed() -> bool:
    """Whether arrays are laid out over a mesh here: not where none is set, nor on one device's share in a shard_map."""
    mesh = jax.sharding.get_abstract_mesh()
    return not (mesh.empty or mesh.are_all_axes_manual)


def spec(*names: Name) -> PartitionSpec | None:
    """The layout of an array whose dimensions have these logical names; None where no mesh is set.

    Raises ValueError where two dimensions would land on one mesh axis.
    """
    if not meshed():
        return None
    axes = [mesh_axes(name) for name in names]
    used = [axis for group in axes for axis in group]
    if len(used) != len(set(used)):
        raise ValueError(f"logical axes {names} put one mesh axis on two dimensions: {axes}")
    return PartitionSpec(*(group if len(group) > 1 else group[0] if group else None for group in axes))


def each_device(run: Callable[..., Any], in_specs: Any, out_specs: Any, check_vma: bool = True) -> Callable[..., Any]:
    """``run`` on each device's own share: `jax.shard_map` over the axes that none around it has taken."""
    mesh = jax.sharding.get_abstract_mesh()
    axes = frozenset(mesh.axis_names) - frozenset(mesh.manual_axes)
    mapped: Callable[..., Any] = jax.shard_map(
        run, in_specs=in_specs, out_specs=out_specs, axis_names=axes, check_vma=check_vma
    )
    return mapped


def drawn(draw: Callable[..., jax.Array], shape: tuple[int, ...], *names: Name) -> jax.Array:
    """``draw(shape)``, random numbers with rows first, laid out by logical names: the same numbers on every mesh. Where
    a shard_map has taken rows apart, those of its own rows of what is drawn for all."""
    apart = tuple(axis for axis in RULES["batch"] if axis in taken())
    if not apart:
        return draw(shape, out_sharding=spec(*names))
    of_all = draw((jax.lax.axis_size(apart), *shape), out_sharding=spec(None, *names))
    return jax.lax.dynamic_index_in_dim(of_all, jax.lax.axis_index(apart), keepdims=False)


def put(x: jax.Array, *names: Name) -> jax.Array:
    """``x`` laid out by logical names; unchanged where no mesh is set."""
    layout = spec(*names)
    return x if layout is None else jax.reshard(x, layout)


def merge(x: jax.Array, *counts: int) -> jax.Array:
    """``x`` with its first dimensions merged into one, the next into another, ..., and what is left into the last; cut
    as it was."""
    ends = np.cumsum([0, *counts])
    groups = [slice(a, b) for a, b in zip(ends, [*ends[1:], x.ndim], strict=True)]
    shape = tuple(math.prod(x.shape[group]) for group in groups)
    if not meshed():
        return x.reshape(shape)
    axes = [part if isinstance(part, tuple) else (part,) if part else () for part in jax.typeof(x).sharding.spec]
    axes += [()] * (x.ndim - len(axes))
    merged = (sum(axes[group], ()) or None for group in groups)
    return jax.lax.reshape(x, shape, out_sharding=PartitionSpec(*merged))


def shards(name: str, mesh_sizes: Mapping[str, int] | None = None) -> int:
    """Into how many parts a dimension of this logical name is cut, on a mesh of these sizes (None: that is set)."""
    if mesh_sizes is None:
        mesh_sizes = jax.sharding.get_abstract_mesh().shape if meshed() else {}
    return math.prod(mesh_sizes.get(axis, 1) for axis in mesh_axes(name))


def check_divides(what: str, shape: tuple[int, ...], axes: tuple[str, ...], mesh_sizes: dict[str, int]) -> None:
    """UserError naming array, axis and sizes where a dimension cannot be cut evenly."""
    for size, name in zip(shape, axes, strict=True):
        parts = shards(name, mesh_sizes)
        if size % parts:
            where = " x ".join(f"mesh.{axis}={mesh_sizes[axis]}" for axis in mesh_axes(name))
            raise UserError(f"{what}: {name} of {size} does not divide over {where}; change either")
