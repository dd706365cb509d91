"""Inputs that nobody thought of: no traceback, no hang, no wrong result.

    make fuzz                     100,000 cases of each target, guided by coverage where atheris is installed
    python -m tests.fuzz packing -runs=1000000      one target, with atheris's own flags

Each target is a function of bytes that raises where something is wrong; `UserError` is a right answer.
"""

import contextlib
import functools
import random
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

from transformer import config
from transformer.cli import split_overrides
from transformer.config import Experiment
from transformer.data.packing import Packing
from transformer.data.store import HEADER_BYTES, TokenStore, Writer
from transformer.data.tokenizer import Bpe, ByteTokenizer
from transformer.data.tokenizer_training import train
from transformer.errors import UserError
from transformer.settings import leaves, override

CASES = 100_000
NAMES = sorted(leaves(Experiment()))
VALUES = ("1", "0", "-1", "2.5", "1e-3", "nan", "inf", "true", "none", "sliding", "rotary", "muon", "1,2", "", "\\,")


@functools.cache
def folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="fuzz-"))


def overrides(data: bytes) -> None:
    """Settings on the command line: refused in one line, or a tree that survives its own checks."""
    draw = random.Random(data)
    words = []
    for part in data.decode("utf-8", "replace").split("\n")[:4]:
        name = draw.choice(NAMES) if draw.random() < 0.7 else part
        value = draw.choice(VALUES) if draw.random() < 0.7 else part
        words.append(f"--config.{name}={value}")
    with contextlib.suppress(UserError):
        changes, rest = split_overrides(words)
        experiment = override(Experiment(), changes)
        config.check(experiment, given=changes)
        assert not rest and override(Experiment(), leaves(experiment)) == experiment


@functools.cache
def written() -> bytes:
    with Writer(folder() / "store", 300, "fuzz") as writer:
        for number in range(5):
            writer.add(np.arange(20) + number, 60, number, True)
    return (folder() / "store").read_bytes()


def store(data: bytes) -> None:
    """A token store with bytes changed anywhere: refused, or what was written."""
    content = bytearray(written())
    for i in range(0, len(data) - 2, 3):
        place = int.from_bytes(data[i : i + 2], "big") % len(content)
        content[place % HEADER_BYTES if data[i + 2] & 1 else place] = data[i + 2]
    path = folder() / "changed"
    path.write_bytes(content[: len(content) - (data[-1] if data and data[0] == 7 else 0)])
    with contextlib.suppress(UserError):
        found = TokenStore(path, 300, "fuzz")
        found.verify()
        assert bytes(content)[HEADER_BYTES:] == written()[HEADER_BYTES:], "a change in the content went unnoticed"
        assert [found.piece(i).tolist() for i in range(5)] == [list(range(i, i + 20)) for i in range(5)]


@functools.cache
def bpe():  # type: ignore[no-untyped-def]
    text = "the cat sat on the mat and the dog ran over the hill\n" * 50
    return train(Bpe(vocab_size=290), iter([text]), len(text))[0]


def tokenizer(data: bytes) -> None:
    """Any text comes back byte for byte, and nothing in it becomes the end of text."""
    text = data.decode("utf-8", "replace")
    for kind in (ByteTokenizer(), bpe()):
        ids = kind.encode(text)
        assert kind.decode_bytes(ids) == text.encode() and kind.end_id not in list(ids)


def packing(data: bytes) -> None:
    """Every token is a target once, or the start of its piece; padding only in the last row."""
    lengths = [2 + byte % 31 for byte in data[2:40]]
    context = 1 + (data[0] if data else 0) % 40
    if not lengths or sum(lengths) < context + 1:
        return
    path = folder() / "packed"
    with Writer(path, 2000, "fuzz") as writer:
        start = 0
        for number, length in enumerate(lengths):
            writer.add(np.arange(start, start + length), length, number, True)
            start += length
    packed = Packing(TokenStore(path), context, seed=data[1])
    batch = packed.rows(np.arange(packed.rows_per_epoch), data[1] % 3)
    trained = batch.targets_BT[batch.weights_BT == 1].tolist()
    starts = np.cumsum([0, *lengths[:-1]]).tolist()
    assert sorted(trained) == sorted(set(range(start)) - set(starts))
    assert (batch.tokens_BT[batch.weights_BT == 1] + 1).tolist() == trained
    path.unlink()


TARGETS: dict[str, Callable[[bytes], None]] = {f.__name__: f for f in (overrides, store, tokenizer, packing)}


def cases(target: Callable[[bytes], None], count: int, seed: int = 0) -> None:
    """``count`` random inputs, some long, some of few different bytes."""
    draw = random.Random(seed)
    for _ in range(count):
        size = draw.choice((0, 1, 3, 10, 40, 200))
        target(bytes(draw.randrange(draw.choice((3, 128, 256))) for _ in range(size)))


if __name__ == "__main__":
    chosen = TARGETS[sys.argv[1]]
    try:
        import atheris
    except ImportError:
        print(f"{chosen.__name__}: atheris is not installed (Python 3.11 has it): {CASES:,} random inputs", flush=True)
        cases(chosen, CASES)
    else:
        flags = sys.argv[2:] or [f"-runs={CASES}", "-max_len=300", "-timeout=20"]
        atheris.instrument_all()
        atheris.Setup([sys.argv[0], *flags], chosen)
        atheris.Fuzz()
