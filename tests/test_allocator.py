"""Freed memory is kept, unless the user has settings of his own."""

import os
import subprocess
import sys

import pytest

CODE = """
import resource, numpy as np
from transformer.allocator import keep_freed_memory
kept = keep_freed_memory()
np.ones(1 << 24)  # 128 MiB, freed at once
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    np.ones(1 << 24)
print(kept, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(environment: dict[str, str]) -> tuple[bool, int]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("MALLOC_") and k != "GLIBC_TUNABLES"}
    found = subprocess.run(
        [sys.executable, "-c", CODE], env=clean | environment, capture_output=True, text=True, check=True
    ).stdout.split()
    return found[0] == "True", int(found[1])


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's settings")
def test_pages_are_not_asked_for_again_and_the_user_s_settings_stay() -> None:
    kept, ours = faults({})
    assert kept and ours < 5000, "five times 32,768 pages otherwise"
    assert faults({"MALLOC_ARENA_MAX": "2"})[0] is False
    assert faults({"GLIBC_TUNABLES": "glibc.malloc.arena_max=2"})[0] is False
