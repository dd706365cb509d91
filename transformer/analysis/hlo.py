"""Read a compiled program's text: how often each part of it runs, which collectives it has, what memory it moves.

The text is XLA's, after all optimisations and in the order of execution. A body of a loop is written once and counts
as often as the loop goes round.
"""

import dataclasses
import math
import re
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import numpy as np

BYTES = {"pred": 1, "s4": 0.5, "u4": 0.5, "bf16": 2} | {
    f"{kind}{bits}": bits // 8 for kind in ("s", "u", "f", "c") for bits in (8, 16, 32, 64, 128)
}
COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
_SHAPE = re.compile(r"\b([a-z]+[0-9]*)\[([0-9,]*)\](?:\{([^}]*)\})?")
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = (.*?)\s([a-z][\w\-]*)\((.*)$")
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")


@dataclasses.dataclass(frozen=True)
class Instruction:
    name: str
    shape: str
    op: str
    rest: str  # operands and attributes

    def attribute(self, name: str) -> str | None:
        found = re.search(rf"\b{name}=%?([\w.\-]+)", self.rest)
        return found and found[1]

    @property
    def operands(self) -> list[str]:
        """Names; ``name#1`` is element 1 of a tuple."""
        return re.findall(r"%([\w.\-]+(?:#\d+)*)", self.rest.split("), ")[0])


def parse(text: str) -> tuple[dict[str, list[Instruction]], str]:
    """Every computation's instructions by its name, and the name of the one that is the program."""
    found: dict[str, list[Instruction]] = {}
    entry, current = "", None
    for line in text.splitlines():
        if start := _COMPUTATION.match(line):
            current = found.setdefault(start[2], [])
            entry = start[2] if start[1] else entry
        elif line.rstrip() == "}":
            current = None
        elif current is not None and (one := _INSTRUCTION.match(line)):
            current.append(Instruction(*one.groups()))
    return found, entry


def size(shape: str, memory_only: bool = False) -> float:
    """Bytes of a shape, or of all of a tuple's; ``memory_only`` leaves out what lies in on-chip memory, S(1)."""
    total = 0.0
    for kind, dimensions, layout in _SHAPE.findall(shape):
        if kind in BYTES and not (memory_only and "S(" in layout):
            total += BYTES[kind] * math.prod(int(d) for d in dimensions.split(",") if d)
    return total


def element(shape: str, path: str) -> str:
    """Of a tuple's shape, that of the element with the numbers ``path``, "#2" or "#2#0"; all of it for none."""
    for number in path.split("#")[1:]:
        depth, start, parts = 0, 1, []
        for at, letter in enumerate(shape):
            depth += (letter in "([{") - (letter in ")]}")
            if depth == 0 or (depth == 1 and letter == ","):
                parts.append(shape[start:at].strip())
                start = at + 1
        shape = parts[int(number)]
    return shape


def trips(loop: Instruction, computations: dict[str, list[Instruction]]) -> int:
    """How often a loop goes round: as the compiler says, or what its counter is compared with; 1 where nobody knows."""
    if known := re.search(r'known_trip_count":\{"n":"(\d+)"', loop.rest):
        return int(known[1])
    condition = computations.get(loop.attribute("condition") or "", [])
    constants = {i.name: int(n[1]) for i in condition if i.op == "constant" and (n := re.match(r"(\d+)\)", i.rest))}
    if condition and condition[-1].op == "compare" and "direction=LT" in condition[-1].rest:
        return next((constants[name] for name in condition[-1].operands if name in constants), 1)
    return 1


def counts(computations: dict[str, list[Instruction]], entry: str) -> dict[str, int]:
    """How often each computation runs in one run of the program. Of branches each counts once."""
    found: dict[str, int] = defaultdict(int)

    def visit(name: str, times: int) -> None:
        found[name] += times
        for i in computations[name]:
            if i.op == "while":
                around = trips(i, computations)
                visit(str(i.attribute("body")), times * around)
                visit(str(i.attribute("condition")), times * around)
                continue
            called = [i.attribute("calls")]
            called += [i.attribute("to_apply")] if i.op == "call" else []
            if several := re.search(r"(?:branch|called)_computations=\{([^}]*)\}", i.rest):
                called += [name.strip(" %") for name in several[1].split(",")]
            for inner in called:
                if inner in computations:
                    visit(inner, times)

    visit(entry, 1)
    return found


def groups(rest: str, devices: int) -> np.ndarray:
    """The groups of devices of one collective, int [groups, devices of each], from any way of writing them."""
    order = r"(?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))?"
    if mesh := re.search(rf"replica_groups=mesh\[([^\]]*)\]{order}\s*\{{([^}}]*)\}}", rest):
        sizes = {name: int(n) for name, n in re.findall(r"'([^']*)'=(\d+)", mesh[1])}
        inside = [list(sizes).index(name) for name in re.findall(r"'([^']*)'", mesh[4])]
        ids = _iota(mesh[2] or str(math.prod(sizes.values())), mesh[3]).reshape(tuple(sizes.values()))
        outside = [axis for axis in range(ids.ndim) if axis not in inside]
        return ids.transpose([*outside, *inside]).reshape(-1, math.prod(ids.shape[axis] for axis in inside))
    if iota := re.search(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", rest):
        return _iota(iota[3], iota[4]).reshape(int(iota[1]), int(iota[2]))
    for name in ("replica_groups", "source_target_pairs"):
        if written := re.search(rf"{name}=\{{((?:\{{[\d,]+\}},?)+)\}}", rest):
            return np.array([[int(n) for n in part.split(",")] for part in re.findall(r"\{([\d,]+)\}", written[1])])
    return np.arange(devices)[None]


def _iota(shape: str, order: str | None) -> np.ndarray:
    """0, 1, 2, ... in that shape, its dimensions in that order."""
    sizes = [int(n) for n in shape.split(",")]
    ids = np.arange(math.prod(sizes)).reshape(sizes)
    return ids.transpose([int(n) for n in order.split(",")]) if order else ids


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of the program: how often a step does it and what it moves."""

    kind: str
    times: int
    size: float  # bytes of the whole array on one device: gathered, or to be reduced
    devices: int  # that take part together
    slices: int  # in which they are
    shape: str

    @property
    def across(self) -> bool:
        """Between slices."""
        return self.slices > 1

    @property
    def moved(self) -> float:
        """Bytes that a device sends, and receives, each time, by the best ways known (a ring, or the torus)."""
        share = (self.devices - 1) / self.devices
        return self.size * {"all-reduce": 2 * share, "collective-permute": 1.0, "send": 1.0}.get(self.kind, share)

    @property
    def between(self) -> float:
        """Of ``moved`` what must go between slices: what a slice lacks, or adds up, its devices carry part by part."""
        if not self.across:
            return 0.0
        missing, together = self.size * (self.slices - 1) / self.slices, self.devices / self.slices
        some = {"all-gather": missing / together, "reduce-scatter": missing / together, "all-to-all": missing}
        return (some | {"all-reduce": 2 * missing / together}).get(self.kind, self.moved)


def collectives(
    computations: dict[str, list[Instruction]], entry: str, devices: int, slices: int = 1
) -> Iterator[Collective]:
    """Every collective of the program, once, with more than one device.

    One that runs beside other work is written several times, each time for a part of the way; its channel tells that
    these are one. An all-reduce of which only a part is kept is a reduce-scatter: TPUs' compiler writes it so.
    """
    seen: set[Any] = set()
    for name, times in counts(computations, entry).items():
        scatters = name.startswith("all-reduce-scatter")
        for i in computations[name]:
            kind = next((kind for kind in COLLECTIVES if i.op in (kind, f"{kind}-start")), None)
            if i.op == "send" and "is_host_transfer=true" in i.rest:  # to other slices, through the hosts
                yield Collective("send", times, size(i.shape), slices, slices, _plain(i.shape))
            channel = i.attribute("channel_id")
            key = (kind, channel or i.name, _plain(i.shape))
            if kind is None or key in seen:
                continue
            seen.add(key)
            together = groups(i.rest, devices)
            if together.shape[1] == 1:
                continue
            kind = "reduce-scatter" if scatters and kind == "all-reduce" else kind
            whole = _whole(i, kind, together.shape[1])
            among = max(len(set(group)) for group in (together // (devices // slices)).tolist())
            yield Collective(kind, times, whole, together.shape[1], among, _plain(i.shape))


def _plain(shape: str) -> str:
    """Without layouts and comments."""
    return re.sub(r"\{[^{}]*\}|/\*.*?\*/", "", shape)


def _whole(i: Instruction, kind: str, devices: int) -> float:
    shapes = [BYTES.get(k, 0) * math.prod(int(d) for d in ds.split(",") if d) for k, ds, _ in _SHAPE.findall(i.shape)]
    if i.op.endswith("-start") and kind != "all-reduce" and len(shapes) > 1:
        # Operand and result are both in the shape, and where several were merged all of each: the larger is the whole.
        return max(size(element(i.shape, part)) for part in ("#0", "#1"))
    return sum(shapes) * (devices if i.op == "reduce-scatter" else 1)


def traffic(computations: dict[str, list[Instruction]], entry: str) -> float:
    """Bytes that a step reads from and writes to the device's memory, about: those of what is outside of fusions.

    Of an array of which an instruction takes a slice, the slice alone is read; where a slice is put into one, the
    slice alone is written.
    """
    free = ("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "conditional", "async-start")
    fused = {i.attribute("calls") for body in computations.values() for i in body if i.op == "fusion"}
    total = 0.0
    for name, times in counts(computations, entry).items():
        if name in fused:
            continue
        shapes = {i.name: i.shape for i in computations[name]}
        for i in computations[name]:
            if i.op not in free and not i.op.endswith("-done"):
                total += times * _touched(i, shapes, computations)
    return total


def _operand(name: str, shapes: dict[str, str]) -> float:
    base, hash_, path = name.partition("#")
    return size(element(shapes[base], hash_ + path), memory_only=True) if base in shapes else 0.0


def _touched(i: Instruction, shapes: dict[str, str], computations: dict[str, list[Instruction]]) -> float:
    """Bytes that one instruction reads and writes."""
    if i.op == "all-reduce-start":
        return 2 * size(i.shape, memory_only=True)
    if (
        i.op.endswith("-start") and i.op.removesuffix("-start") in COLLECTIVES and i.shape.startswith("(")
    ):  # operands, results; merged all of each
        return sum(size(element(i.shape, part), memory_only=True) for part in ("#0", "#1"))
    if i.op.endswith("-start"):  # a copy, or one of a slice: its shape has what it reads, and then what it writes
        both = [m[0] for m in _SHAPE.finditer(i.shape)][:2]
        return sum(size(both[-1].split("{")[0]) for shape in both if "S(" not in shape)
    if i.op in ("dynamic-slice", "slice", "gather"):
        return 2 * size(i.shape, memory_only=True)
    if i.op == "dynamic-update-slice":
        return 2 * _operand(i.operands[1], shapes)
    read = [_operand(operand, shapes) for operand in i.operands]
    written = size(i.shape, memory_only=True)
    for at, inner in _sliced(computations.get(i.attribute("calls") or "", [])).items():
        if at < len(read) and read[at]:
            written -= read[at] if inner < 0 else 0  # given back with the slice put in
            read[at] = abs(inner)
    return max(written, 0.0) + sum(read)


def _sliced(body: list[Instruction]) -> dict[int, float]:
    """Of a fusion's parameters those of which slices alone are used: by number, the bytes of these; below zero where
    a slice is put in and the whole given back."""
    found: dict[int, float] = {}
    for p in body:
        if p.op != "parameter":
            continue
        names = {p.name}
        for i in body:  # through what moves nothing
            if i.op in ("bitcast", "copy") and i.operands and i.operands[0] in names:
                names.add(i.name)
        users = [i for i in body if names & set(i.operands) and i.name not in names]
        if users and all(i.op in ("dynamic-slice", "slice", "gather") and i.operands[0] in names for i in users):
            found[int(p.rest.split(")")[0])] = sum(size(i.shape) for i in users)
        elif users and all(i.op == "dynamic-update-slice" and i.operands[0] in names for i in users):
            sizes = {i.name: i.shape for i in body}
            found[int(p.rest.split(")")[0])] = -sum(size(sizes.get(i.operands[1], "")) for i in users)
    return found
