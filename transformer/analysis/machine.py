"""What this machine can do at best: the limits that speeds are compared with."""

import functools
import os
import resource
import sys
import time

import jax
import jax.numpy as jnp


@functools.cache
def matmul_rate(dtype: str) -> float:
    """FLOPs per second of one device in a product of two large square matrices, the best of several tries."""
    size = 1024 if jax.default_backend() == "cpu" else 8192  # large enough to keep all of it busy
    key = jax.random.key(0)
    a = jax.random.normal(key, (size, size), jnp.float32).astype(dtype)
    product = jax.jit(lambda x, y: x @ y)
    product(a, a).block_until_ready()
    best = min(_seconds(lambda: product(a, a)) for _ in range(12))
    return 2 * size**3 / best


@functools.cache
def bandwidth(megabytes: int = 256) -> float:
    """Bytes per second read by a sum over an array far larger than the caches, the best of several tries."""
    x = jnp.ones((megabytes << 20) // 4, jnp.float32)
    total = jax.jit(jnp.sum)
    total(x).block_until_ready()
    return x.nbytes / min(_seconds(lambda: total(x)) for _ in range(6))


def _seconds(work: object) -> float:
    start = time.perf_counter()
    jax.block_until_ready(work())  # type: ignore[operator]
    return time.perf_counter() - start


def memory(devices: int) -> int:
    """Bytes that each of so many devices has: their own limit where they tell one, else a share of the machine's."""
    here = jax.local_devices()
    stats = here[0].memory_stats()
    if stats and "bytes_limit" in stats:
        return int(stats["bytes_limit"])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // min(devices, len(here))


def peak_memory() -> int:
    """Bytes: the device's own count where it keeps one, else this process's largest resident size."""
    stats = jax.local_devices()[0].memory_stats()
    if stats and "peak_bytes_in_use" in stats:
        return int(stats["peak_bytes_in_use"])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
