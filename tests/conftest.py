"""What every test runs under: eight devices made of the CPU, and no silent broadcasting.

Eight devices cost nothing where a test uses one. Programs are compiled without the expensive
optimisations where a test asks for it (`tests.small.jit`): compiling is what such tests wait for.
"""

import sys
from pathlib import Path

import jax

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_platforms", "cpu")
# Arrays of unlike rank meet only where the code says how: a forgotten axis is an error, not an outer product.
jax.config.update("jax_numpy_rank_promotion", "raise")

# Tests import what they share as tests.NAME, from wherever pytest was started.
sys.path.insert(0, str(Path(__file__).parent.parent))
