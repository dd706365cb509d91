"""Sentences of one kind, ``the cat chased the mouse.``, with known chances: what should come next is known exactly.

A subject and a verb are uniform; whom it is about depends on both, so behind ``chased`` only a model that looks back at
the subject can know the chances of what comes next.
"""

from collections.abc import Iterator

import numpy as np

from transformer.data.tasks.draws import Draws

DOCUMENTS, SENTENCES = 512, 64
FORMULA = 1  # raise it when the text changes
WHOM = {
    ("cat", "chased"): {"the mouse": 5, "the bird": 2, "its tail": 2, "a ball": 1},
    ("cat", "watched"): {"the bird": 6, "the dog": 3, "a ball": 1},
    ("dog", "chased"): {"the cat": 4, "a ball": 3, "its tail": 3},
    ("dog", "watched"): {"a ball": 5, "the cat": 4, "the mouse": 1},
    ("fox", "chased"): {"the bird": 6, "the mouse": 3, "its tail": 1},
    ("fox", "watched"): {"the dog": 8, "a bird": 2},
    ("bird", "chased"): {"a fly": 7, "the mouse": 3},
    ("bird", "watched"): {"the cat": 5, "the fox": 4, "a fly": 1},
}  # tenths


def texts() -> Iterator[str]:
    """The documents, the same on every machine; a sentence is a line."""
    pairs = list(WHOM)
    for d in range(DOCUMENTS):
        draws = Draws(0, np.arange(d * SENTENCES, (d + 1) * SENTENCES))
        about, tenths = draws.below(len(pairs), 1)[:, 0], draws.below(10, 1)[:, 0]
        yield "".join(_sentence(pairs[i], t) for i, t in zip(about.tolist(), tenths.tolist(), strict=True))


def chances(beginning: str) -> dict[str, float]:
    """The chance of each word behind the beginning of a sentence, ``the cat chased``; empty where none begins so."""
    words, found = beginning.split(), dict[str, float]()
    for pair, whom in WHOM.items():
        for phrase, tenths in whom.items():
            sentence = ["the", *pair, *f"{phrase} .".split()]
            if sentence[: len(words)] == words and len(words) < len(sentence):
                found[sentence[len(words)]] = found.get(sentence[len(words)], 0) + tenths
    return {word: n / sum(found.values()) for word, n in found.items()}


def _sentence(pair: tuple[str, str], tenth: int) -> str:
    phrases = [phrase for phrase, tenths in WHOM[pair].items() for _ in range(tenths)]
    return f"the {pair[0]} {pair[1]} {phrases[tenth]}.\n"
