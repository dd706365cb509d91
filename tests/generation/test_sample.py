"""Text in, text out: one start token, whole characters, the same text for the same seed."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import small
from transformer.config import Experiment
from transformer.data.tokenizer import Bytes, ByteTokenizer
from transformer.errors import UserError
from transformer.generation.sample import MOST, Stream, encode_prompts, room, sample
from transformer.generation.sampling import Sampling
from transformer.model.attention import Attention
from transformer.model.config import Model
from transformer.model.positions import Rotary
from transformer.model.spans import Sliding
from transformer.run import Run

END = 256


def a_run(context: int = 16) -> Run:
    model = Model(depth=1, width=16, heads=2, context=context)
    return Run(Path("nowhere"), Experiment(model=model, tokenizer=Bytes()), ByteTokenizer())


RUN = a_run()


@pytest.fixture(scope="module")
def params() -> Iterator[Any]:
    jax.config.update("jax_disable_most_optimizations", True)
    yield jax.tree.map(jnp.asarray, small.weights(RUN.experiment, size=0.3))
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.mark.parametrize("prompt", ["", "ab", "</s>", "<s>ab", "\x00", "<end of text>"])
def test_a_prompt_has_exactly_one_start_token(prompt: str) -> None:
    """T08, T07: it is added in one place, and no text stands for it."""
    [ids] = encode_prompts(RUN, [prompt])
    assert ids[0] == END and ids.count(END) == 1
    assert RUN.tokenizer.decode(ids) == prompt


def test_a_prompt_that_brings_its_own_start_token_is_refused_at_the_models_door(params: Any) -> None:
    """T08: ids that were already given a start."""
    from transformer.generation.decode import Generator, continue_prompts

    generator = Generator(RUN.experiment, Sampling(), (END,))
    with pytest.raises(UserError, match="start token 2 times"):
        next(continue_prompts(generator, params, [[END, END, 5]], 1))


def test_the_same_seed_gives_the_same_text_and_another_another(params: Any) -> None:
    def text(seed: int, **more: Any) -> list[str]:
        *_, last = sample(RUN, params, ["a", "bcd"], Sampling(temperature=1.0), new=9, seed=seed, **more)
        return [s.text for s in last]

    wanted = text(1)
    assert text(1) == wanted == text(1, chunk=2) == text(1, use_cache=False) == text(1, use_cache=False, chunk=4)
    assert text(2) != wanted and text((1 << 32) - 1) != wanted


def test_nothing_asked_for_means_what_fits(params: Any) -> None:
    *_, last = sample(RUN, params, ["abc", ""], Sampling(temperature=0.0))
    assert all(len(s.ids) == 12 or s.ended for s in last)
    local = Model(context=16, attention=Attention(span=Sliding(window=4)), positions=Rotary())
    endless = dataclasses.replace(RUN, experiment=Experiment(model=local, tokenizer=Bytes()))
    assert room(endless, [[END] * 40]) == MOST, "text may go on beyond the context"
    assert room(a_run(1000), [[END]]) == MOST and room(a_run(256), [[END] * 200, [END]]) == 56


@pytest.mark.parametrize(
    ("prompt", "more", "words"),
    [
        ("x" * 16, {}, ["--prompt", "17", "16"]),
        ("x" * 20, {"new": 1}, ["21", "16"]),
        ("x" * 15, {"new": 1}, ["16", "1", "16"]),
        ("x", {"new": 0}, ["--tokens: 0"]),
        ("x", {"new": -3}, ["--tokens: -3"]),
        ("x", {"seed": -1}, ["--seed: -1"]),
        ("x", {"piece": 0}, ["--piece: 0"]),
        ("x", {"seed": 1 << 32}, ["--seed: 4294967296"]),
        ("\udcff", {}, ["lone surrogate"]),
    ],
)
def test_what_does_not_fit_is_refused(prompt: str, more: dict[str, int], words: list[str]) -> None:
    """G07: nothing is cut off in silence. Before any weight is looked at."""
    with pytest.raises(UserError) as error:
        next(sample(RUN, None, [prompt], Sampling(), **more))  # type: ignore[arg-type]
    assert all(word in str(error.value) for word in words), error.value


@settings(deadline=None)
@given(st.text(), st.lists(st.integers(0, 9), max_size=6))
def test_streamed_pieces_are_whole_characters(text: str, sizes: list[int]) -> None:
    """A character whose bytes are spread over tokens is given out when its last byte is there."""
    try:
        ids = RUN.tokenizer.encode(text).tolist()
    except UserError:
        return  # a lone surrogate is no text
    stream, given, at = Stream(RUN), "", 0
    for size in [*sizes, len(ids)]:
        at = min(at + size, len(ids))
        given += stream.more(ids[:at])
        assert text.startswith(given)
    assert given + stream.more(ids, final=True) == text


@settings(deadline=None)
@given(st.lists(st.integers(0, 256), max_size=12), st.integers(1, 5))
def test_what_is_streamed_is_what_is_returned(ids: list[int], chunk: int) -> None:
    """Also for bytes that are no characters, and where the text ends inside one."""
    stream = Stream(RUN)
    pieces = [stream.more(ids[:n]) for n in range(0, len(ids) + 1, chunk)]
    assert "".join(pieces) + stream.more(ids, final=True) == RUN.tokenizer.decode(ids)


def test_a_character_of_three_bytes_comes_at_once() -> None:
    ids = RUN.tokenizer.encode("a\u20acb").tolist()
    stream = Stream(RUN)
    assert [stream.more(ids[:n]) for n in range(1, 6)] == ["a", "", "", "\u20ac", "b"]
