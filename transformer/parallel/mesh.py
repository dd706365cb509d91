"""The mesh of devices. One device is a mesh of ones: the same code, the same type checks."""

import math
from collections.abc import Sequence

import jax
from jax.experimental import mesh_utils
from jax.sharding import AxisType

from transformer.errors import UserError
from transformer.settings import hints, settings


@settings
class Mesh:
    """How many devices along each mesh axis; their product is the number of devices used."""

    data: int = 1  # copies of the weights, each with its own rows
    fsdp: int = 1  # rows as well, with the weights cut over this axis and gathered when used
    tensor: int = 1  # heads, MLP width and vocabulary cut over this axis


def sizes(config: Mesh) -> dict[str, int]:
    return {name: getattr(config, name) for name in hints(Mesh)}


def check(config: Mesh) -> None:
    """UserError for an axis below 1."""
    for name, size in sizes(config).items():
        if size < 1:
            raise UserError(f"config.mesh.{name}: {size} is not a number of devices, set 1 or more")


def make_mesh(config: Mesh, devices: Sequence[jax.Device] | None = None) -> jax.sharding.Mesh:
    """The explicit mesh, over the first of ``devices`` (None: of all). UserError where they are too few."""
    check(config)
    by_axis = sizes(config)
    wanted, found = math.prod(by_axis.values()), devices or jax.devices()
    if wanted > len(found):
        axes = " x ".join(f"{name}={size}" for name, size in by_axis.items())
        raise UserError(
            f"config.mesh: {axes} needs {wanted} devices, found {len(found)} ({found[0].platform}); make one smaller"
        )
    # Unlike jax.make_mesh it may split an axis of a TPU's torus: 8 x 2 on one of 4 x 4.
    placed = mesh_utils.create_device_mesh(
        tuple(by_axis.values()), list(found[:wanted]), allow_split_physical_axes=True
    )
    return jax.sharding.Mesh(placed, tuple(by_axis), axis_types=(AxisType.Explicit,) * len(by_axis))


def platform() -> str:
    """What the program is traced for: cpu, gpu or tpu, that of the mesh that is set; this machine's where none is.

    The mesh's devices need not be here: a program is also compiled ahead for machines that are elsewhere.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    found: str = jax.default_backend() if device is None else device.platform
    return "gpu" if found == "cuda" else found
