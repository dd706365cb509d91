"""What each TPU generation is called by Cloud TPU, Compute Engine and GKE, and how many hosts a slice has.

Names are those of Google's documentation: https://cloud.google.com/tpu/docs and
https://cloud.google.com/kubernetes-engine/docs/concepts/tpus.
"""

import math
import re
from dataclasses import dataclass

from launch.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Generation:
    accelerator: str  # Cloud TPU's accelerator type without its number; empty: not offered there
    cores: int  # what that number counts per chip
    runtime: str  # Cloud TPU's image for it
    machine: str  # Compute Engine's machine type without its number of chips
    gke: str  # GKE's label cloud.google.com/gke-tpu-accelerator
    dimensions: int  # of a shape
    widest: int  # chips on one host where a slice has only that host


GENERATIONS = {
    "v4": Generation(
        accelerator="v4",
        cores=2,
        runtime="tpu-ubuntu2204-base",
        machine="ct4p-hightpu",
        gke="tpu-v4-podslice",
        dimensions=3,
        widest=4,
    ),
    "v5e": Generation(
        accelerator="v5litepod",
        cores=1,
        runtime="v2-alpha-tpuv5-lite",
        machine="ct5lp-hightpu",
        gke="tpu-v5-lite-podslice",
        dimensions=2,
        widest=8,
    ),
    "v5p": Generation(
        accelerator="v5p",
        cores=2,
        runtime="v2-alpha-tpuv5",
        machine="ct5p-hightpu",
        gke="tpu-v5p-slice",
        dimensions=3,
        widest=4,
    ),
    "v6e": Generation(
        accelerator="v6e",
        cores=1,
        runtime="v2-alpha-tpuv6e",
        machine="ct6e-standard",
        gke="tpu-v6e-slice",
        dimensions=2,
        widest=8,
    ),
    "tpu7x": Generation(
        accelerator="",
        cores=2,
        runtime="",
        machine="tpu7x-standard",
        gke="tpu7x",
        dimensions=3,
        widest=4,
    ),
}
HOST = 4  # chips on each host of a slice that has several


@dataclass(frozen=True, kw_only=True)
class Slice:
    """One slice: chips that share a fast network, on one or several hosts."""

    generation: str
    shape: str  # "4x4"

    def __str__(self) -> str:
        return f"{self.generation}:{self.shape}"

    @property
    def about(self) -> Generation:
        return GENERATIONS[self.generation]

    @property
    def chips(self) -> int:
        return math.prod(int(side) for side in self.shape.split("x"))

    @property
    def hosts(self) -> int:
        return 1 if self.chips <= self.about.widest else self.chips // HOST

    @property
    def accelerator_type(self) -> str:
        return f"{self.about.accelerator}-{self.chips * self.about.cores}"

    @property
    def machine_type(self) -> str:
        return f"{self.about.machine}-{self.chips // self.hosts}t"


def parse(text: str) -> Slice:
    """'v5e:4x4' or 'v5p:2x2x4', the form that `plan` takes."""
    generation, colon, shape = text.partition(":")
    if generation not in GENERATIONS:
        raise UserError(f"--topology: {generation!r} is no TPU generation (there are: {', '.join(GENERATIONS)})")
    sides = GENERATIONS[generation].dimensions
    if not colon or not re.fullmatch("x".join([r"[1-9]\d*"] * sides), shape):
        example = "4x4" if sides == 2 else "2x2x4"
        raise UserError(f"--topology: {text!r} has no shape of {sides} sides; write it as {generation}:{example}")
    made = Slice(generation=generation, shape=shape)
    if made.hosts > 1 and made.chips % HOST:
        raise UserError(f"--topology: {text}: {made.chips} chips do not divide by the {HOST} of a host")
    return made


def zone(text: str) -> str:
    """A zone such as us-east5-a; a region is refused with the form that is wanted."""
    if re.fullmatch(r"[a-z]+-[a-z]+\d+-[a-z]", text):
        return text
    if re.fullmatch(r"[a-z]+-[a-z]+\d+", text):
        raise UserError(f"--zone: {text!r} is a region; a zone has a letter after it, as in {text}-a")
    raise UserError(f"--zone: {text!r} is not a zone; one looks like us-east5-a")


def region(zone: str) -> str:
    """The region that a zone is in."""
    return zone.rsplit("-", 1)[0]
