"""What accelerators can do at best, as their maker publishes it: the assumptions of `plan`.

Source: Google Cloud's documentation of Cloud TPU, the pages "TPU v4", "TPU v5e", "TPU v5p", "TPU v6e" and "TPU7x"
(docs.cloud.google.com/tpu/docs/v5e and so on), tables of specifications per chip; the links' bandwidth is half of the
"bidirectional inter-chip interconnect bandwidth", and the network between slices the "data center network bandwidth"
(of v5e that of a pod by its 256 chips; v4 has no such figure and is given v5p's). GPUs: NVIDIA's data sheets of the
SXM modules, FLOPs without sparsity, half of NVLink's bandwidth as they count both directions, and between machines one
network card for each GPU as in a DGX of that generation. Nothing here was measured.
"""

import dataclasses
import math
import os
import re
from typing import Any

from transformer.errors import UserError, did_you_mean

GIB = 1 << 30
FRACTION = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")  # its name now, and before


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
    cores: int = 0  # of a GPU: its multiprocessors; and what else XLA asks of one that is not here
    capability: tuple[int, int] = (0, 0)
    shared: int = 0  # bytes of a multiprocessor's shared memory
    clock: float = 0.0  # GHz
    l2: int = 0  # bytes of cache

    @property
    def available(self) -> float:
        """Bytes that JAX takes for arrays: of a GPU's by default three quarters."""
        if self.platform == "tpu":
            return self.memory
        name, share = next(((name, os.environ[name]) for name in FRACTION if os.environ.get(name)), ("", "0.75"))
        try:
            found = float(share)
        except ValueError:
            found = math.nan
        if not 0 < found < math.inf:
            raise UserError(f"{name}: {share!r} is not a part of the memory, such as 0.75")
        return self.memory * found

    @property
    def platform(self) -> str:
        return "gpu" if self.cores else "tpu"

    @property
    def target(self) -> str:
        """A GPU as XLA describes it (its GpuTargetConfigProto, as text)."""
        major, minor = self.capability
        return f"""
            gpu_device_info {{
              threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
              block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
              registers_per_core_limit: 65536 registers_per_block_limit: 65536
              shared_memory_per_block: 49152 shared_memory_per_block_optin: {self.shared - 1024}
              shared_memory_per_core: {self.shared}
              core_count: {self.cores} fpus_per_core: {128 if major >= 9 else 64} clock_rate_ghz: {self.clock}
              memory_bandwidth: {self.bandwidth:.0f} device_memory_size: {self.available:.0f} l2_cache_size: {self.l2}
              cuda_compute_capability {{ major: {major} minor: {minor} }}
            }}
            platform_name: "CUDA"
            dnn_version_info {{ major: 9 minor: 8 }}
            runtime_version {{ major: 12 minor: 8 }}
            device_description_str: "{self.name}"
        """


AMPERE: dict[str, Any] = {"capability": (8, 0), "shared": 164 * 1024, "clock": 1.41, "l2": 40 << 20}
HOPPER: dict[str, Any] = {"capability": (9, 0), "shared": 228 * 1024, "clock": 1.98, "l2": 50 << 20}
CHIPS = {
    chip.name: chip
    for chip in (
        Chip("v4", 32 * GIB, 275e12, 1.2e12, 300e9, 6, 6.25e9, 3, devices=2),
        Chip("v5e", 16 * GIB, 197e12, 0.819e12, 200e9, 4, 3.125e9, 2),
        Chip("v5p", 95 * GIB, 459e12, 2.765e12, 600e9, 6, 6.25e9, 3),
        Chip("v6e", 32 * GIB, 918e12, 1.638e12, 400e9, 4, 12.5e9, 2),
        Chip("tpu7x", 192 * GIB, 2307e12, 7.38e12, 600e9, 6, 12.5e9, 3, devices=2),
        Chip("a100", 80 * GIB, 312e12, 2.039e12, 300e9, 12, 25e9, 1, cores=108, **AMPERE),
        Chip("h100", 80 * GIB, 989e12, 3.35e12, 450e9, 18, 50e9, 1, cores=132, **HOPPER),
        Chip("h200", 141 * GIB, 989e12, 4.8e12, 450e9, 18, 50e9, 1, cores=132, **HOPPER),
    )
}
LARGEST = 1024  # chips of one slice


@dataclasses.dataclass(frozen=True)
class Topology:
    """A slice of chips, and how many of them; of GPUs a slice is one machine."""

    name: str  # as libtpu knows it, v5e:16x16; or h100:8
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
    example = f"{kind}:" + ("8" if chip.platform == "gpu" else "x".join(["4"] * chip.dimensions))
    if not colon or not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", shape):
        raise UserError(f"--topology: {name!r} has no sizes; write them as in {example}")
    sizes = [int(size) for size in shape.split("x")]
    if len(sizes) != chip.dimensions:
        many = f"{chip.dimensions} dimension" + "s" * (chip.dimensions > 1)
        raise UserError(f"--topology: {name}: a slice of {kind} has {many}, such as {example}")
    if chip.platform == "gpu" and sizes[0] > 8:
        raise UserError(f"--topology: {name}: a machine has up to 8; several are --topology={kind}:8 --slices=N")
    if math.prod(sizes) > LARGEST:
        raise UserError(f"--topology: {name} has {math.prod(sizes)} chips; plan goes up to {LARGEST} a slice")
    if slices < 1:
        raise UserError(f"--slices: {slices} is not a number of slices, set 1 or more")
    return Topology(name, chip, math.prod(sizes) * slices, slices)
