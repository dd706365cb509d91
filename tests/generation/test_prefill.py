"""Prompts that are read in pieces: the logits and the cache of the model that reads them whole.

B rows, S places for text, P prompt positions, V vocabulary.
"""

from typing import Any

import jax
import numpy as np
import pytest

from tests.generation.tiny import END, GREEDY, V, experiment, plain, quick_compiler, weights  # noqa: F401
from transformer.generation.decode import extend
from transformer.generation.prefill import Generator, prefill
from transformer.generation.sampling import Sampling
from transformer.model.attention import Attention
from transformer.model.grouped import Grouped
from transformer.model.positions import POSITIONS, Alibi, Learned, Rotary
from transformer.model.spans import Chunked, Global, Pattern, Sliding

PIECE, CONTEXT = (
    5,
    23,
)  # prompts that end before, at and after the ends of pieces, windows and chunks; 23 is no multiple
SPANS = [
    Global(),
    Sliding(window=3),  # less than a piece
    Sliding(window=7),  # more than one
    Sliding(window=PIECE),
    Chunked(chunk=4),
    Chunked(chunk=8),
    Pattern(blocks=("local", "global"), local=Chunked(chunk=6)),
]
QUICK = [
    (Pattern(local=Sliding(window=3)), Learned),
    (Pattern(local=Chunked(chunk=4)), Rotary),
    (Sliding(window=7), Alibi),
]
EVERY = [(span, kind) for span in SPANS for kind in POSITIONS if (span, kind) not in QUICK]


def text_of_every_length(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Rows whose prompts have 1, 2, ..., CONTEXT - 1 tokens; behind them other tokens, which must not matter."""
    random = np.random.default_rng(seed)
    lengths_B = np.arange(1, CONTEXT, dtype=np.int32)
    return random.integers(0, V, (len(lengths_B), CONTEXT)).astype(np.int32), lengths_B


@pytest.mark.parametrize(
    ("span", "positions"), [*QUICK, *(pytest.param(*pair, marks=pytest.mark.exhaustive) for pair in EVERY)], ids=str
)
def test_pieces_give_what_the_whole_gives_at_every_length(span: Any, positions: type) -> None:
    """Logits after every prompt, and after one more token, against the model alone, which has neither pieces nor a
    cache: a wrong place in the cache is seen by the second."""
    form: dict[str, Any] = {"stack": "scan", "depth": 3} if isinstance(span, Pattern) else {}
    attention = Attention(span=span, projection=Grouped())
    config = experiment(attention=attention, positions=positions(), context=CONTEXT, **form)
    penalty = Sampling(temperature=0.0, repetition_penalty=1.1)  # for which it is kept which tokens were seen
    params, generator = weights(config), Generator(config, penalty, (), piece=PIECE)
    tokens_BP, lengths_B = text_of_every_length()
    text = prefill(generator, params, tokens_BP, lengths_B, lengths_B < 1, CONTEXT)
    wanted = plain(config, params, tokens_BP)[np.arange(len(lengths_B)), lengths_B - 1]
    assert np.ptp(wanted) > 1
    assert [set(np.flatnonzero(row)) for row in text.seen_BV] == [
        set(row[:length]) for row, length in zip(tokens_BP, lengths_B, strict=True)
    ]
    np.testing.assert_allclose(text.logits_BV, wanted, atol=2e-5, rtol=0)
    text = extend(generator, params, text, lengths_B + 1, 1, np.uint32(0))
    assert text.lengths_B.tolist() == (lengths_B + 1).tolist()
    wanted = plain(config, params, np.asarray(text.tokens_BS))[np.arange(len(lengths_B)), lengths_B]
    np.testing.assert_allclose(text.logits_BV, wanted, atol=2e-5, rtol=0)


def test_memory_does_not_grow_with_the_prompt_beyond_cache_and_text() -> None:
    """The compiler's plan for prompts of 1,024 and 16,384 tokens that are read in pieces of 128: of a model with a
    window the same, but for copies of the text itself. Read at once it takes ten times that."""

    def planned(piece: int, places: int) -> int:
        config = experiment(attention=Attention(span=Sliding(window=64)), positions=Rotary(), depth=1)
        generator = Generator(config, GREEDY, (), piece=piece)
        like = jax.eval_shape(lambda: weights(config))
        tokens, lengths, done = np.zeros((1, places), np.int32), np.ones(1, np.int32), np.zeros(1, bool)
        compiled = prefill.lower(generator, like, tokens, lengths, done, places).compile()
        return int(compiled.memory_analysis().temp_size_in_bytes)

    short, long, at_once = planned(128, 1024), planned(128, 16384), planned(16384, 16384)
    assert 0 <= long - short <= 2 * 4 * (16384 - 1024)
    assert at_once > 10 * long
