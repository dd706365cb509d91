"""How one published tensor and our weights are laid out to one another: reshaping, transposing and joining alone.

Ours are [inputs..., outputs...] and lie stacked along a first dimension where each block has one. Theirs are matrices
of one block each, often [outputs, inputs], sometimes several of ours side by side.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from transformer.model.layers import Weight


class Entry(NamedTuple):
    """One tensor of theirs, by name with {i} for the block's number, and which of ours are in it, in order.

    ``transposed``: it is [outputs, inputs]. ``by_head``: those of ours alternate head by head (GPT-NeoX), else each
    is whole before the next.
    """

    theirs: str
    ours: tuple[str, ...]
    transposed: bool = False
    by_head: bool = False

    @property
    def of_blocks(self) -> bool:
        return "{i}" in self.theirs


def linear(theirs: str, *ours: str, by_head: bool = False) -> tuple[Entry, Entry]:
    """The weight [outputs, inputs] of a torch.nn.Linear and its bias."""
    return (
        Entry(f"{theirs}.weight", tuple(f"{name}/w" for name in ours), transposed=True, by_head=by_head),
        Entry(f"{theirs}.bias", tuple(f"{name}/b" for name in ours), by_head=by_head),
    )


def norm(theirs: str, ours: str) -> tuple[Entry, Entry]:
    """The scale and the shift of a norm."""
    return Entry(f"{theirs}.weight", (f"{ours}/scale",)), Entry(f"{theirs}.bias", (f"{ours}/b",))


def flat_shape(w: Weight) -> tuple[int, ...]:
    """Of one block: a matrix [inputs, outputs], a vector, or a table as it is."""
    shape = w.shape[int(w.stacked) :]
    if w.inputs:
        return math.prod(shape[: w.inputs]), math.prod(shape[w.inputs :])
    return (math.prod(shape),) if w.role in ("bias", "scale") else shape


def their_shape(entry: Entry, weights: Sequence[Weight]) -> tuple[int, ...]:
    """The shape that their tensor must have."""
    shapes = [flat_shape(w) for w in weights]
    joined = (*shapes[0][:-1], sum(shape[-1] for shape in shapes))
    return joined[::-1] if entry.transposed else joined


def split(entry: Entry, theirs: np.ndarray, weights: Sequence[Weight]) -> list[np.ndarray]:
    """Ours, each in the shape that one block's has, from their tensor."""
    joined = theirs.T if entry.transposed else theirs
    if entry.by_head:
        heads, width = weights[0].shape[-2:]
        apart = joined.reshape(*joined.shape[:-1], heads, len(weights), width)
        parts = [apart[..., k, :] for k in range(len(weights))]
    else:
        parts = np.split(joined, np.cumsum([flat_shape(w)[-1] for w in weights])[:-1], axis=-1)
    return [part.reshape(w.shape[int(w.stacked) :]) for part, w in zip(parts, weights, strict=True)]


def join(entry: Entry, ours: Sequence[np.ndarray], weights: Sequence[Weight]) -> np.ndarray:
    """Their tensor from one block's of ours: the inverse of ``split``."""
    if entry.by_head:
        apart = [part.reshape(*flat_shape(w)[:-1], *w.shape[-2:]) for part, w in zip(ours, weights, strict=True)]
        joined = np.stack(apart, axis=-2).reshape(*apart[0].shape[:-2], -1)
    else:
        joined = np.concatenate([part.reshape(flat_shape(w)) for part, w in zip(ours, weights, strict=True)], axis=-1)
    return np.ascontiguousarray(joined.T if entry.transposed else joined)
