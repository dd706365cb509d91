"""A shuffle that is a formula: where item i goes, in constant time and memory.

A Feistel network permutes the integers below a power of four; values that fall outside the wanted range
are sent through again until they fall inside (cycle walking), which leaves a permutation of the range.
Integers only, so the order is the same on every machine and with every version of every library.
"""

import numpy as np
import numpy.typing as npt

Int64 = npt.NDArray[np.int64]
_ROUNDS = 6
_MASK = (1 << 64) - 1


def mix(value: int) -> int:
    """A well-mixed 64-bit hash of an integer (the finaliser of SplitMix64)."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def permute(index: npt.ArrayLike, size: int, seed: int, epoch: int) -> Int64:
    """Where each ``index`` (any shape, 0 <= index < size) goes: int64 of the same shape, a bijection."""
    values = np.asarray(index, np.uint64)
    assert size >= 1 and (values.size == 0 or int(values.max()) < size), "index outside the permutation"
    # At least 3 bits a half: with fewer there is too little room to mix.
    half = max(3, ((size - 1).bit_length() + 1) // 2)
    keys = [mix(mix(mix(seed & _MASK) + epoch) + r) for r in range(_ROUNDS)]
    flat = _feistel(values.reshape(-1), half, keys)
    outside = np.flatnonzero(flat >= size)
    while outside.size:
        flat[outside] = _feistel(flat[outside], half, keys)
        outside = outside[flat[outside] >= size]
    return flat.astype(np.int64).reshape(values.shape)


def _feistel(values: npt.NDArray[np.uint64], half: int, keys: list[int]) -> npt.NDArray[np.uint64]:
    bits, low = np.uint64(half), np.uint64((1 << half) - 1)
    left, right = values >> bits, values & low
    for key in keys:
        # 64-bit products wrap by design; the top bits are the well-mixed ones.
        hashed = (right + np.uint64(key)) * np.uint64(0x9E3779B97F4A7C15)
        hashed = (hashed ^ (hashed >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
        left, right = right, left ^ (hashed >> np.uint64(64 - half))
    return (left << bits) | right
