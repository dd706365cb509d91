"""What every test runs under: eight devices made of the CPU, and no silent broadcasting.

Eight devices cost nothing where a test uses one. Programs are compiled without the expensive
optimisations where a test asks for it (`tests.small.jit`): compiling is what such tests wait for.
"""

import itertools
import os
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

# XLA's older emitters compile small programs in two thirds of the time (docs/log.md). `make exhaustive` compiles as
# users do, and so does a JAX that has no such choice any more: a flag that it does not know ends the process.
if "exhaustive" not in sys.argv and tuple(map(int, version("jaxlib").split(".")[:2])) < (0, 11):
    quick = "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
    os.environ["XLA_FLAGS"] = f"{quick} {os.environ.get('XLA_FLAGS', '')}".strip()

import jax
import pytest

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_platforms", "cpu")
# Arrays of unlike rank meet only where the code says how: a forgotten axis is an error, not an outer product.
jax.config.update("jax_numpy_rank_promotion", "raise")

# Tests import what they share as tests.NAME, from wherever pytest was started.
sys.path.insert(0, str(Path(__file__).parent.parent))

_DONE = itertools.count(1)


@pytest.fixture(autouse=True)
def few_programs() -> Iterator[None]:
    """A process may map its memory in 65,530 pieces, and compiled programs take some each: the long tests' thousands
    end with an abort in the compiler."""
    yield
    if next(_DONE) % 200 == 0:
        jax.clear_caches()
