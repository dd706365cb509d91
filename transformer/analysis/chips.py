"""What accelerators can do at best, as their maker publishes it: the assumptions of `plan`.

Source: Google Cloud's documentation of Cloud TPU, the pages "TPU v4", "TPU v5e", "TPU v5p", "TPU v6e" and "TPU7x"
(docs.cloud.google.com/tpu/docs/v5e and so on), tables of specifications per chip; the links' bandwidth is half of the
"bidirectional inter-chip interconnect bandwidth", and the network between slices the "data center network bandwidth"
(of v5e that of a pod by its 256 chips; v4 has no such figure and is given v5p's). Nothing here was measured.
"""

import dataclasses
import math
import re

from transformer.errors import UserError, did_you_mean

GIB = 1 << 30


@dataclasses.dataclass(frozen=True)
class Chip:
    """One generation, per chip. Bandwidths are bytes per second; ``ici`` is all links together, in one direction."""

    name: str
    memory: int  # bytes of HBM
    flops: float  # per second, bfloat16
    bandwidth: float  # of HBM
    ici: float
    links: int
    dcn: float  # between slices
    dimensions: int  # of the torus, and so of a topology's name
    devices: int = 1  # that JAX sees on each chip


CHIPS = {
    chip.name: chip
    for chip in (
        Chip("v4", 32 * GIB, 275e12, 1.2e12, 300e9, 6, 6.25e9, 3, devices=2),
        Chip("v5e", 16 * GIB, 197e12, 0.819e12, 200e9, 4, 3.125e9, 2),
        Chip("v5p", 95 * GIB, 459e12, 2.765e12, 600e9, 6, 6.25e9, 3),
        Chip("v6e", 32 * GIB, 918e12, 1.638e12, 400e9, 4, 12.5e9, 2),
        Chip("tpu7x", 192 * GIB, 2307e12, 7.38e12, 600e9, 6, 12.5e9, 3, devices=2),
    )
}
LARGEST = 1024  # chips of one slice


@dataclasses.dataclass(frozen=True)
class Topology:
    """A slice of chips, and how many of them."""

    name: str  # as libtpu knows it, v5e:16x16
    chip: Chip
    chips: int  # in all slices
    slices: int = 1

    @property
    def devices(self) -> int:
        """What JAX sees, in all slices."""
        return self.chips * self.chip.devices

    def per_device(self, value: float) -> float:
        """A chip's share of something for each device."""
        return value / self.chip.devices


def topology(name: str, slices: int = 1) -> Topology:
    """The topology that ``v5e:16x16`` names. UserError for one that is not known."""
    kind, colon, shape = name.partition(":")
    if kind not in CHIPS:
        raise UserError(f"--topology: {kind!r} is not a kind of chip that is known{did_you_mean(kind, CHIPS)}")
    chip = CHIPS[kind]
    example = f"{kind}:" + "x".join(["4"] * chip.dimensions)
    if not colon or not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", shape):
        raise UserError(f"--topology: {name!r} has no sizes; write them as in {example}")
    sizes = [int(size) for size in shape.split("x")]
    if len(sizes) != chip.dimensions:
        raise UserError(f"--topology: {name}: a slice of {kind} has {chip.dimensions} dimensions, such as {example}")
    if math.prod(sizes) > LARGEST:
        raise UserError(f"--topology: {name} has {math.prod(sizes)} chips; plan goes up to {LARGEST} a slice")
    if slices < 1:
        raise UserError(f"--slices: {slices} is not a number of slices, set 1 or more")
    return Topology(name, chip, math.prod(sizes) * slices, slices)
