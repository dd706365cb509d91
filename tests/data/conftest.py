"""What several tests of the data room share."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from transformer.data import corpora
from transformer.data.store import TokenStore, Writer
from transformer.data.tokenizer import Bpe, SentencePieceTokenizer, Unigram
from transformer.data.tokenizer_training import train

WORDS = [
    "the",
    "cat",
    "sat",
    "on",
    "a",
    "mat",
    "and",
    "dogs",
    "ran",
    "over",
    "hills,",
    "while",
    "rain",
    "fell.\n",
]


def prose(seed: int, words: int = 2000) -> str:
    """Some text that is different for each seed, with a vocabulary a small tokenizer can learn."""
    state, out = seed + 1, []
    for _ in range(words):
        state = state * 6364136223846793005 + 1442695040888963407 & (1 << 64) - 1
        out.append(WORDS[(state >> 33) % len(WORDS)] + ("s" if state >> 62 else ""))
    return " ".join(out) + f" {seed}\n"


@pytest.fixture(scope="session")
def bpe() -> SentencePieceTokenizer:
    return train(Bpe(vocab_size=290), [prose(0)])[0]


@pytest.fixture(scope="session")
def unigram() -> SentencePieceTokenizer:
    return train(Unigram(vocab_size=290), [prose(0)])[0]


@pytest.fixture(scope="session")
def user_cache() -> Path:
    """The user's own cache, where the bundled corpus is fetched once for all runs."""
    cache = Path.home() / ".cache" / "decoder-transformer"
    corpora.shakespeare(cache)
    return cache


@pytest.fixture
def make_store(tmp_path: Path) -> Callable[..., TokenStore]:
    """A store from lists of ids, one piece each, each a document of its own."""
    made = iter(range(1000))

    def make(pieces: Sequence[Sequence[int]], vocab_size: int = 257) -> TokenStore:
        path = tmp_path / f"{next(made)}.tokens"
        with Writer(path, vocab_size, "test") as writer:
            for number, ids in enumerate(pieces):
                writer.add(ids, len(ids), number, True)
        return TokenStore(path)

    return make
