"""The mesh of devices. One device is a mesh of ones: the same code, the same type checks."""

import math
import os
from collections.abc import Iterable, Sequence

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType

from transformer.errors import UserError
from transformer.settings import hints, settings

ACCELERATORS = ("tpu", "cuda", "gpu", "rocm")  # as JAX_PLATFORMS spells them


@settings
class Mesh:
    """How many devices along each mesh axis; their product is the number of devices used."""

    slice: int = 1  # as data, over groups of devices with a slow network between them
    data: int = 1  # copies of the weights, each with its own rows
    fsdp: int = 1  # rows as well, with the weights cut over this axis and gathered when used
    expert: int = 1  # rows as well, with the experts of a mixture cut over this axis and the tokens exchanged
    context: int = 1  # positions of a row, with keys and values gathered
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
    wanted, found = math.prod(by_axis.values()), devices or all_devices()
    if wanted > len(found):
        axes = " x ".join(f"{name}={size}" for name, size in by_axis.items() if size > 1)
        raise UserError(
            f"config.mesh: {axes} needs {wanted} devices, found {len(found)} ({found[0].platform}); make one smaller"
        )
    types = (AxisType.Explicit,) * len(by_axis)
    # GPUs do not always say which machine they are in: then they are taken in their order.
    known = found[0].platform == "tpu" or len({getattr(device, "slice_index", 0) for device in found}) > 1
    if config.slice > 1 and known:
        return jax.sharding.Mesh(by_slice(by_axis, found), tuple(by_axis), axis_types=types)
    return jax.sharding.Mesh(laid_out(by_axis.values(), found[:wanted]), tuple(by_axis), axis_types=types)


def all_devices() -> list[jax.Device]:
    """Of all processes. UserError where JAX_PLATFORMS names an accelerator first and JAX finds none: of some kinds it
    says so, of others it ends with an assertion, or goes on with the CPU without a word."""
    asked, found, why = os.environ.get("JAX_PLATFORMS", "").split(",")[0], list[jax.Device](), ""
    try:
        found = jax.devices()
    except (RuntimeError, AssertionError) as error:
        if asked not in ACCELERATORS:
            raise
        why = f": {error}".splitlines()[0].rstrip(": ")
    if asked in ACCELERATORS and (not found or found[0].platform == "cpu"):
        there = f"{len(found)} of the CPU" if found else f"no device{why}"
        raise UserError(
            f"JAX_PLATFORMS: {asked} is asked for and JAX finds {there}; set JAX_PLATFORMS=cpu to go without"
        )
    return found


def laid_out(shape: Iterable[int], devices: Sequence[jax.Device]) -> np.ndarray:
    """Devices of one network in the mesh's shape. Unlike jax.make_mesh it may split an axis of a TPU's torus: 8 x 2 on
    one of 4 x 4. Of a v4 as libtpu compiles for it JAX lays out nothing: there devices stand as they are numbered."""
    if devices[0].device_kind == "TPU v4" and len(devices) > len({tuple(d.coords) for d in devices}):
        return np.array(devices).reshape(tuple(shape))
    found: np.ndarray = mesh_utils.create_device_mesh(tuple(shape), list(devices), allow_split_physical_axes=True)
    return found


def by_slice(by_axis: dict[str, int], devices: Sequence[jax.Device]) -> np.ndarray:
    """Devices of a machine of several slices, in the mesh's shape: only the slice axis crosses from one to another."""
    groups = dict[int, list[jax.Device]]()
    for device in devices:
        groups.setdefault(device.slice_index, []).append(device)
    inner = [size for name, size in by_axis.items() if name != "slice"]
    if len(groups) != by_axis["slice"] or any(len(group) != math.prod(inner) for group in groups.values()):
        found = ", ".join(str(len(group)) for group in groups.values())
        raise UserError(
            f"config.mesh.slice: {by_axis['slice']} slices of {math.prod(inner)} devices were asked for, "
            f"there are {len(groups)} of {found}"
        )
    return np.stack([laid_out(inner, group) for _, group in sorted(groups.items())])


def platform() -> str:
    """What the program is traced for: cpu, gpu or tpu, that of the mesh that is set; this machine's where none is.

    The mesh's devices need not be here: a program is also compiled ahead for machines that are elsewhere.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    found: str = jax.default_backend() if device is None else device.platform
    return "gpu" if found == "cuda" else found
