"""Between a family's tensors and the tree of ours, one tensor at a time."""

import re
from collections.abc import Iterator
from typing import Any

import numpy as np

from transformer.errors import UserError
from transformer.interop.common import EMBEDDING, HEAD, Family
from transformer.interop.layouts import Entry, join, split, their_shape
from transformer.interop.source import Source
from transformer.model.layers import Weight, declared_leaves


def places(family: Family, declared: dict[str, Weight], depth: int) -> Iterator[tuple[str, Entry, int, list[str]]]:
    """Every tensor that the model has in this family: its name, its entry, its block (0 for none), our paths."""
    for entry in family.entries:
        paths = [f"blocks/{name}" if entry.of_blocks else name for name in entry.ours]
        if all(path in declared for path in paths):
            for i in range(depth if entry.of_blocks else 1):
                yield entry.theirs.replace("{i}", str(i)), entry, i, paths


def read(family: Family, source: Source, declared: Any, depth: int) -> Any:
    """The tree of our weights, float32. UserError where a tensor is missing, extra, or of another shape.

    All names and shapes are looked at before anything is read; then it takes the weights and one tensor of memory.
    """
    flat = declared_leaves(declared)
    names = _names(family, source)
    wanted = {name: (entry, i, paths) for name, entry, i, paths in places(family, flat, depth)}
    uncovered = flat.keys() - {path for _, _, paths in wanted.values() for path in paths}
    assert not uncovered, f"no tensor of {family.name} for {sorted(uncovered)}"
    head = next(entry.theirs for entry in family.entries if entry.ours == (HEAD,))
    table = next(entry.theirs for entry in family.entries if entry.ours == (EMBEDDING,))
    tied = head in names and HEAD not in flat
    _check(source, names, {n: their_shape(e, [flat[p] for p in paths]) for n, (e, _, paths) in wanted.items()}, head)
    if tied and not np.array_equal(source.read(names[head]), source.read(names[table])):
        raise UserError(f"{source.where}: the unembedding is tied to the embedding and {head} differs from {table}")
    ours = {path: np.empty(w.shape, np.float32) for path, w in flat.items()}
    for name, (entry, i, paths) in wanted.items():
        parts = split(entry, source.read(names[name]), [flat[path] for path in paths])
        for path, part in zip(paths, parts, strict=True):
            ours[path][i if entry.of_blocks else ...] = part
    return tree(ours)


def tree(flat: dict[str, np.ndarray]) -> Any:
    """Weights by path as the tree that they are in the model."""
    found: dict[str, Any] = {}
    for path, value in flat.items():
        *groups, last = path.split("/")
        here = found
        for group in groups:
            here = here.setdefault(group, {})
        here[last] = value
    return found


def _names(family: Family, source: Source) -> dict[str, str]:
    """The tensors by the family's full names: files of the body alone leave the prefix out."""
    heads = {entry.theirs for entry in family.entries if not entry.theirs.startswith(family.prefix)}
    bare = not any(name.startswith(family.prefix) for name in source.shapes)
    full = {f"{family.prefix}{name}" if bare and name not in heads else name: name for name in source.shapes}
    return {name: stored for name, stored in full.items() if not re.fullmatch(family.buffers, name)}


def _check(source: Source, names: dict[str, str], wanted: dict[str, tuple[int, ...]], head: str) -> None:
    for name, shape in wanted.items():
        if name not in names:
            raise UserError(f"{source.where}: {name} is missing, {len(wanted)} tensors are wanted")
        found = source.shapes[names[name]]
        if found != shape:
            raise UserError(f"{source.where}: {name} has the shape {list(found)}, by config.json it is {list(shape)}")
    extra = sorted(names.keys() - wanted.keys() - {head})
    if extra:
        raise UserError(f"{source.where}: {extra[0]} is not a tensor of this model ({len(extra)} are not)")


def write(family: Family, params: dict[str, np.ndarray], wanted: Any, depth: int) -> Iterator[tuple[str, np.ndarray]]:
    """Every tensor of the family, by name, from our weights by path. ``wanted`` declares the model that the family
    has; a bias that ours lacks is one of zeros."""
    flat = declared_leaves(wanted)
    for name, entry, i, paths in places(family, flat, depth):
        weights = [flat[path] for path in paths]
        parts = []
        for path, w in zip(paths, weights, strict=True):
            if path not in params:
                assert path.endswith("/b"), path
                parts.append(np.zeros(w.shape[int(w.stacked) :], np.float32))
            else:
                parts.append(np.asarray(params[path][i] if entry.of_blocks else params[path]))
        yield name, join(entry, parts, weights)
