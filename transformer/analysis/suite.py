"""The standard comparison: training, generation, start-up, memory and compile time of three sizes of GPT-2.

Each figure stands beside the floor that was measured in the same run, and beside Hugging Face's GPT-2 on
torch where that is installed. Contenders are processes (contender.py) that take turns, A B A B; what counts
is the median of each. Formulas: training FLOPs of a step are 6 N n + 12 L D T n for n tokens and
N = 12 L D^2 + V D; the floor of a generated token is the bytes of the weights over the memory bandwidth.
"""

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from transformer.analysis.contender import PROMPT, SIZES
from transformer.analysis.machine import bandwidth, matmul_rate
from transformer.errors import UserError

PARTS = ("train", "generate", "start", "attention", "depth")  # where none are chosen
DTYPES = ("float32", "bfloat16")
ROUNDS = 5
# Several share one accelerator, and every program is compiled anew.
FRESH = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "JAX_ENABLE_COMPILATION_CACHE": "false"}
ROOT = Path(__file__).parents[2]


class Contender:
    """A process that works when told to. ``times`` has the seconds of each piece of work after the first."""

    def __init__(self, environment: dict[str, str] | None = None, **asked: Any):
        self.name = json.dumps(asked)
        begun = time.perf_counter()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "transformer.analysis.contender", self.name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE if not os.environ.get("BENCH_ERRORS") else None,
            text=True,
            cwd=ROOT,
            env=os.environ | FRESH | (environment or {}),
        )
        self._hear("ready")
        self.first = self.go()
        self.start = time.perf_counter() - begun  # from nothing to the end of the first piece of work
        self.times: list[float] = []

    def go(self) -> float:
        self._say("go")
        return self._hear("seconds")

    def end(self) -> float:
        """The largest resident size in bytes."""
        self._say("end")
        peak = self._hear("peak")
        self._process.communicate()
        return peak

    @property
    def median(self) -> float:
        return sorted(self.times)[len(self.times) // 2]

    def _say(self, word: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(word + "\n")
        self._process.stdin.flush()

    def _hear(self, what: str) -> float:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            error = (self._process.communicate()[1] or "").strip().splitlines()
            raise RuntimeError(f"the contender {self.name} ended: {error[-1] if error else 'without a word'}")
        return float(json.loads(line)[what])


def take_turns(contenders: Sequence[Contender], rounds: int | None = None) -> list[float]:
    """Let each work ``rounds`` times in turn; returns what each held at most, in bytes, and ends them."""
    for _ in range(rounds or ROUNDS):
        for contender in contenders:
            contender.times.append(contender.go())
    return [contender.end() for contender in contenders]


def peers_installed() -> bool:
    return all(importlib.util.find_spec(name) for name in ("torch", "transformers"))


def suite(parts: Sequence[str], sizes: Sequence[str], say: Callable[[str], None]) -> dict[str, Any]:
    """Measure ``parts`` for ``sizes``; seconds, bytes, tokens per second, and shares of the floors."""
    for given, known, flag in ((parts, tuple(MEASURES), "--parts"), (sizes, tuple(SIZES), "--sizes")):
        for name in given:
            if name not in known:
                raise UserError(f"{flag}: {name!r} is not one of {', '.join(known)}")
    say("measuring the machine")
    limits = {f"matmul_{d}": matmul_rate(d) for d in DTYPES} | {"memory_bandwidth": bandwidth()}
    peers = peers_installed()
    if not peers:
        say("no peers: torch and transformers are not installed (pip install -e '.[peers]')")
    found: dict[str, Any] = {"limits": limits, "peers": peers}
    for part in parts:
        found[part] = MEASURES[part](sizes, peers, limits, say)
        say(table(part, found[part]))  # what was measured is seen even where a later part is not waited for
    return found


def train(sizes: Sequence[str], peers: bool, limits: dict[str, float], say: Callable[[str], None]) -> Any:
    rows = []
    for size in sizes:
        say(f"training steps, {size}")
        names: list[dict[str, Any]] = [{"who": "ours", "dtype": d} for d in DTYPES] + [{"who": "peer"}] * peers
        contenders = [Contender(what="train", size=size, **name) for name in names]
        peaks = take_turns(contenders)
        D, L, _, T, V, B = SIZES[size]
        flops = B * T * (6 * (12 * L * D**2 + V * D) + 12 * L * D * T)
        for name, contender, peak in zip(names, contenders, peaks, strict=True):
            floor = flops / limits[f"matmul_{name.get('dtype', 'float32')}"]
            rows.append(
                {"size": size, **name, "seconds": contender.median, "tokens_per_second": B * T / contender.median}
                | {"mfu": floor / contender.median, "first_step": contender.first, "peak_memory": peak}
                | ({"times_peer": contenders[-1].median / contender.median} if peers else {})
            )
    return rows


def generate(sizes: Sequence[str], peers: bool, limits: dict[str, float], say: Callable[[str], None]) -> Any:
    rows, size = [], "M"
    D, L, _, T, V, _ = SIZES[size]
    floor = 4 * (12 * L * D**2 + V * D) / limits["memory_bandwidth"]  # seconds a token, float32
    for count in (1, 8):
        say(f"generation, {size}, {count} rows")
        names: list[dict[str, Any]] = [{"who": "ours", "dtype": "float32"}] + [{"who": "peer"}] * peers
        contenders = [Contender(what="generate", size=size, rows=count, **name) for name in names]
        take_turns(contenders, 3)
        for name, contender in zip(names, contenders, strict=True):
            rate = count * (T - PROMPT) / contender.median
            rows.append(
                {"size": size, "rows": count, **name, "tokens_per_second": rate}
                | {"share_of_floor": rate / count * floor}
                | ({"times_peer": contenders[-1].median / contender.median} if peers else {})
            )
    return rows


def start(sizes: Sequence[str], peers: bool, limits: dict[str, float], say: Callable[[str], None]) -> Any:
    """Seconds from the start of a process to the end of its first training step, S."""
    say("start-up")
    rows: dict[str, list[float]] = {"cold": [], "warm": [], "peer": []}
    for _ in range(3):
        with tempfile.TemporaryDirectory() as folder:
            for kind in ("cold", "warm"):
                programs = {"JAX_ENABLE_COMPILATION_CACHE": "true", "JAX_COMPILATION_CACHE_DIR": folder}
                programs["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
                contender = Contender(programs, who="ours", what="train", size="S", dtype="float32")
                contender.end()
                rows[kind].append(contender.start)
        if peers:
            contender = Contender(who="peer", what="train", size="S")
            contender.end()
            rows["peer"].append(contender.start)
    return [{"who": who, "seconds": sorted(times)[1]} for who, times in rows.items() if times]


def attention(sizes: Sequence[str], peers: bool, limits: dict[str, float], say: Callable[[str], None]) -> Any:
    """Time and memory of attention alone, forward and backward, by context; memory above that of a short context."""
    rows = []
    kinds: list[dict[str, Any]] = [{"who": "ours", "kernel": name} for name in ("plain", "blockwise")]
    kinds += [{"who": "peer"}] * peers
    for context in (1024, 4096, 8192, 16384):
        say(f"attention, context {context}")
        wanted = [k for k in kinds if k.get("kernel") != "plain" or context <= 8192]
        contenders = [Contender(what="attention", context=context, **k) for k in wanted]
        peaks = take_turns(contenders, 3)
        for kind, contender, peak in zip(wanted, contenders, peaks, strict=True):
            rows.append({"context": context, **kind, "seconds": contender.median, "peak_memory": peak})
    return rows


def depth(sizes: Sequence[str], peers: bool, limits: dict[str, float], say: Callable[[str], None]) -> Any:
    """The first step, which compiles, by depth."""
    rows = []
    for stack in ("scan", "unroll"):
        for blocks in (4, 48):
            say(f"first step of {blocks} blocks, {stack}")
            more: Any = {"depth": blocks, "stack": stack, "context": 64}
            contender = Contender(who="ours", what="train", size="S", dtype="float32", **more)
            peak = contender.end()
            rows.append({"stack": stack, "depth": blocks, "first_step": contender.first, "peak_memory": peak})
    return rows


def kinds(sizes: Sequence[str], peers: bool, limits: dict[str, float], say: Callable[[str], None]) -> Any:
    """Every kind of attention, forward, backward and decoding; milliseconds."""
    from transformer.analysis import kinds

    return kinds.measure(limits, say)


MEASURES = {
    "train": train,
    "generate": generate,
    "start": start,
    "attention": attention,
    "depth": depth,
    "kinds": kinds,
}


def text(found: dict[str, Any]) -> str:
    """Tables that fit Markdown."""
    limits = found["limits"]
    products = ", ".join(f"{limits[f'matmul_{d}'] / 1e9:,.0f} GFLOP/s in a {d} product" for d in DTYPES)
    lines = [f"Limits: {products}, {limits['memory_bandwidth'] / 1e9:,.1f} GB/s from memory."]
    lines += [table(part, found[part]) for part in MEASURES if found.get(part)]
    return "\n".join(lines)


def table(part: str, rows: list[dict[str, Any]]) -> str:
    columns = list(dict.fromkeys(name for row in rows for name in row))
    lines = ["", f"{part}:", "", "| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(_cell(c, row.get(c)) for c in columns) + " |" for row in rows]
    return "\n".join(lines)


def _cell(column: str, value: Any) -> str:
    if value is None:
        return ""
    if column == "peak_memory":
        return f"{value / 2**20:,.0f} MiB"
    if column in ("mfu", "share_of_floor"):
        return f"{value:.0%}"
    if column == "tokens_per_second":
        return f"{value:,.0f}"
    return f"{value:.3f}" if isinstance(value, float) else str(value)
