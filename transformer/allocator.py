"""Keep freed memory on the CPU instead of giving it back after every step.

XLA frees its buffers at the end of a step; glibc hands them back to the system, which has to give out and clear the
same pages again in the next one. Kept, a training step takes as much memory and a third less time or so
(docs/speed.md). Where the user has settings of his own, or the C library is another, nothing is done.
"""

import ctypes
import os
import sys

_SETTINGS = {  # of mallopt(3)
    -4: 0,  # M_MMAP_MAX: large blocks come from the one heap, not from mappings that go when they are freed
    -1: (1 << 31) - 1,  # M_TRIM_THRESHOLD: the heap is not cut back
    -2: 64 << 20,  # M_TOP_PAD: and grows in large steps
    -8: 1,  # M_ARENA_MAX: one heap for all threads
}


def keep_freed_memory() -> bool:
    """Whether it was done. Call it before anything large is allocated."""
    theirs = "GLIBC_TUNABLES" in os.environ or any(name.startswith("MALLOC_") for name in os.environ)
    if theirs or sys.platform != "linux":
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and all([mallopt(name, value) for name, value in _SETTINGS.items()])
