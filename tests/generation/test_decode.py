"""Decoding: the cache against the plain model at every step, lengths, ends, and what may not change a draw.

B rows, S places for text, V vocabulary.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import small
from tests.generation.tiny import END, GREEDY, V, experiment, plain, quick_compiler, weights  # noqa: F401
from transformer.config import Experiment
from transformer.data.tokenizer import Unigram
from transformer.errors import UserError
from transformer.generation.decode import Continuation, Generator, continue_prompts, extend, prefill
from transformer.generation.sampling import Sampling
from transformer.model.attention import KINDS, Attention
from transformer.model.config import Model
from transformer.model.grouped import Grouped, MultiHead
from transformer.model.masks import causal
from transformer.model.positions import POSITIONS, Alibi, Learned, None_, Rotary
from transformer.model.scores import Sigmoid, Softmax
from transformer.model.spans import Chunked, Pattern, Sliding
from transformer.model.transformer import Transformer

PROMPTS = [[END], [END, 3, 0], [END, 1, 2, 3, 4, 5, 6, 7, 8]]
SHARED = (MultiHead,)  # every kind of positions with this one, and one for the others

VARIANTS = [(kind, positions) for kind in KINDS for positions in (POSITIONS if kind in SHARED else (Rotary,))]


def all_of(generator: Generator, params: Any, prompts: Sequence[Sequence[int]], new: int, **more: Any) -> list[Any]:
    *_, last = continue_prompts(generator, params, prompts, new, **more)
    return last


@pytest.mark.parametrize(("kind", "positions"), VARIANTS, ids=lambda cls: cls.__name__)
def test_cached_logits_equal_uncached_ones_at_every_step(kind: type, positions: type) -> None:
    """G01, G06: a batch of prompts of 1, 3 and 9 tokens; the logits of each row and step against the model alone."""
    config = experiment(attention=Attention(projection=kind()), positions=positions())
    params, generator = weights(config), Generator(config, GREEDY, end_ids=())
    tokens_BP = np.full((3, 9), 7, np.int32)  # what fills up short prompts must not matter
    for b, prompt in enumerate(PROMPTS):
        tokens_BP[b, : len(prompt)] = prompt
    lengths_B = np.array([len(p) for p in PROMPTS], np.int32)
    text = prefill(generator, params, tokens_BP, lengths_B, np.zeros(3, bool), 16)
    found = [np.asarray(text.logits_BV)]
    for _ in range(6):
        text = extend(generator, params, text, lengths_B + 7, 1, np.uint32(0))
        found.append(np.asarray(text.logits_BV))
    tokens_BS = np.asarray(text.tokens_BS)
    for b, prompt in enumerate(PROMPTS):
        whole = tokens_BS[b : b + 1, : len(prompt) + 6]
        assert whole[0, : len(prompt)].tolist() == prompt
        wanted = plain(config, params, whole)[0, len(prompt) - 1 :]
        np.testing.assert_allclose([step[b] for step in found], wanted, atol=1e-5, rtol=0)
        assert whole[0, len(prompt) :].tolist() == wanted[:-1].argmax(-1).tolist()
        assert np.ptp(wanted) > 1, "the logits say something"


ROUND = Attention(span=Sliding(window=3))  # the cache goes round in three places
FORMS: list[dict[str, Any]] = [
    {"stack": "scan"},
    {"bias": True, "tie_embeddings": True},
    {"head_width": 6},
    {"attention": ROUND},
    {"attention": Attention(span=Chunked(chunk=4), projection=Grouped()), "positions": Rotary(), "stack": "scan"},
    {
        "attention": Attention(
            span=Pattern(blocks=("local", "local", "global"), local=Chunked(chunk=3), rotate_global=False),
            scores=Softmax(soft_cap=2.0, sinks=True),
        ),
        "positions": Rotary(),
        "depth": 5,
        "stack": "scan",
        "loops": 2,
    },
    {"attention": Attention(scores=Sigmoid(), qk_norm="width", gate=True), "norms": "peri", "parallel": True},
]


@pytest.mark.parametrize("changes", FORMS)
def test_the_same_for_other_forms_of_the_model(changes: dict[str, Any]) -> None:
    config = experiment(**changes)
    params = weights(config)
    found = all_of(Generator(config, GREEDY, ()), params, PROMPTS, 4)
    for prompt, row in zip(PROMPTS, found, strict=True):
        whole = np.array([prompt + row.ids])
        assert row.ids == plain(config, params, whole)[0, len(prompt) - 1 : -1].argmax(-1).tolist()


@pytest.mark.parametrize("prompt", [[END], [END, 1, 2], [END, 1, 2, 3], [END, 1, 2, 3, 4]], ids=len)
def test_a_cache_that_is_just_full_writes_over_its_oldest_entry(prompt: list[int]) -> None:
    """G04: a window of 4, from before it is full to twice round: logits of the model alone, which has no cache."""
    config = experiment(attention=Attention(span=Sliding(window=4)), positions=Rotary(), depth=1)
    params, generator, lengths_B = weights(config), Generator(config, GREEDY, ()), np.array([len(prompt)], np.int32)
    text = prefill(generator, params, np.array([prompt], np.int32), lengths_B, np.zeros(1, bool), 16)
    assert {x.shape for x in jax.tree.leaves(text.cache)} == {(1, 4, 4, 4)}
    for length in range(len(prompt), 12):
        whole = np.asarray(text.tokens_BS)[:, :length]
        np.testing.assert_allclose(text.logits_BV, plain(config, params, whole)[:, -1], atol=1e-5, rtol=0)
        text = extend(generator, params, text, lengths_B + 12, 1, np.uint32(0))


def test_in_bfloat16_the_cache_has_the_computations_dtype_and_logits_agree_to_its_precision() -> None:
    config = experiment(dtype="bfloat16")
    params, generator = weights(config), Generator(config, GREEDY, ())
    text = prefill(generator, params, np.array([[END, 1, 2]], np.int32), np.array([3], np.int32), np.zeros(1, bool), 16)
    assert {x.dtype for x in jax.tree.leaves(text.cache)} == {jnp.dtype("bfloat16")}
    assert text.logits_BV.dtype == jnp.float32
    text = extend(generator, params, text, np.array([5], np.int32), 2, np.uint32(0))
    wanted = plain(config, params, np.asarray(text.tokens_BS)[:, :5])[:, -1]
    np.testing.assert_allclose(text.logits_BV, wanted, atol=3e-2)


@pytest.mark.parametrize("positions", [Rotary(), Alibi(), None_()])
def test_text_goes_on_beyond_the_context_where_no_block_looks_that_far(positions: Any) -> None:
    """80 tokens with a context of 16: the ids of a model whose context holds them all, from a cache of the window."""
    attention = Attention(span=Sliding(window=5))
    config, wide = (experiment(attention=attention, positions=positions, context=n) for n in (16, 128))
    params, generator = weights(config), Generator(config, GREEDY, ())
    (row,) = all_of(generator, params, [[END, 1, 2]], 80)
    wanted = plain(wide, params, np.array([[END, 1, 2, *row.ids]]))[0, 2:-1].argmax(-1)
    assert row.ids == wanted.tolist()
    tokens, one = np.array([[END, 1, 2]], np.int32), np.ones(1, np.int32)
    for places in (16, 4096):
        text = prefill(generator, params, tokens, 3 * one, one > 1, places)
        assert all(x.shape == (1, 4, 5, 4) for x in jax.tree.leaves(text.cache))
    with pytest.raises(UserError, match="exceed the context of 16"):
        all_of(Generator(experiment(positions=positions), GREEDY, ()), params, [[END]], 80)


@pytest.mark.parametrize(
    ("positions", "new"),
    [
        (Rotary(), 200),
        *(pytest.param(kind(), 100_000, marks=pytest.mark.exhaustive) for kind in (Rotary, Alibi, None_)),
    ],
    ids=str,
)
def test_memory_stays_flat_far_beyond_the_context(positions: Any, new: int) -> None:
    """Text of a model that was made for 16 positions: what the loop needs beside the text itself, four bytes for
    each token, is what it needs for 64 tokens; and at the end the logits are those of the model alone at those
    positions, which looks no further back than its two windows together."""
    config = experiment(attention=Attention(span=Sliding(window=5)), positions=positions)
    params, generator = weights(config), Generator(config, GREEDY, ())
    lengths_B, places = np.full(1, 3, np.int32), 1 << (new + 2).bit_length()

    def begun(places: int) -> Any:
        return prefill(generator, params, np.array([[END, 1, 2]], np.int32), lengths_B, np.zeros(1, bool), places)

    def planned(places: int) -> int:
        text = jax.eval_shape(lambda: begun(places))
        given = generator, params, text, lengths_B + new, np.int32(new), np.uint32(0)
        memory = extend.lower(*given).compile().memory_analysis()  # type: ignore[attr-defined]
        return int(memory.temp_size_in_bytes + memory.argument_size_in_bytes)

    text = begun(places)
    cache = sum(x.nbytes for x in jax.tree.leaves(text.cache))
    assert cache == 2 * config.model.depth * 5 * 16 * 4
    assert planned(places) - planned(64) <= 2 * 4 * (places - 64)  # the text, and a copy of it
    text = extend(generator, params, text, lengths_B + new, new, np.uint32(0))
    assert text.lengths_B.tolist() == [3 + new]
    assert sum(x.nbytes for x in jax.tree.leaves(text.cache)) == cache
    tail = np.asarray(text.tokens_BS)[:, 3 + new - 16 : 3 + new]
    index_BT = np.arange(3 + new - 16, 3 + new, dtype=np.int32)[None]
    alone = small.jit(lambda params: Transformer(config.model, V).apply({"params": params}, tail, index_BT, causal(16)))
    wanted = alone(params)[0][:, -1]
    np.testing.assert_allclose(text.logits_BV, wanted, atol=1e-4)


def test_a_prompt_longer_than_the_window_and_the_context() -> None:
    attention, prompt = Attention(span=Sliding(window=5)), [END, *([3, 1, 4, 1, 5, 9, 2, 6] * 4)]
    config, wide = (experiment(attention=attention, positions=Rotary(), context=n) for n in (16, 64))
    params = weights(config)
    (row,) = all_of(Generator(config, GREEDY, (), piece=6), params, [prompt], 7)
    wanted = plain(wide, params, np.array([prompt + row.ids]))[0, len(prompt) - 1 : -1].argmax(-1)
    assert row.ids == wanted.tolist()


@pytest.mark.parametrize("positions", list(POSITIONS), ids=lambda cls: cls.__name__)
def test_unequal_prompts_give_the_ids_that_each_gives_alone(positions: type) -> None:
    """G01: prompts of 3 and 9 tokens, greedy."""
    config = experiment(positions=positions())
    params, generator = weights(config), Generator(config, GREEDY, (END,))
    together = all_of(generator, params, PROMPTS[1:], 7)
    assert together == [all_of(generator, params, [p], 7)[0] for p in PROMPTS[1:]]
    for prompt, row in zip(PROMPTS[1:], together, strict=True):
        wanted = plain(config, params, np.array([prompt + row.ids]))[0, len(prompt) - 1 : -1].argmax(-1)
        assert row.ids == wanted.tolist()


@pytest.mark.parametrize("filler", [END, 3])
def test_masks_come_from_lengths_and_never_from_ids(filler: int) -> None:
    """G02: text that holds the token which fills up short prompts, also as its last."""
    config = experiment()
    params, generator = weights(config), Generator(config, GREEDY, (END,))
    prompts = [[END, 3, 3, END, 3], [END, 1, END, 3, 4, 5, 6, END]]
    tokens_BP = np.array([p + [filler] * (16 - len(p)) for p in prompts], np.int32)
    text = prefill(generator, params, tokens_BP, np.array([5, 8], np.int32), np.zeros(2, bool), 16)
    for b, prompt in enumerate(prompts):
        wanted = plain(config, params, np.array([prompt]))[0, -1]
        np.testing.assert_allclose(text.logits_BV[b], wanted, atol=1e-5, rtol=0)


def test_prompts_of_like_length_share_their_programs() -> None:
    """A second prompt does not compile: lengths are rounded up, and everything else is data."""
    config = experiment()
    params, generator = weights(config), Generator(config, GREEDY, (END,))
    all_of(generator, params, [[END, 1, 2]], 3)
    before = prefill._cache_size(), extend._cache_size()  # type: ignore[attr-defined]
    for prompt in ([END], [END, 5, 6, 7, 8, 9, 10, 11, 12], [END] + [3] * 11):
        all_of(generator, params, [prompt], 3)
    all_of(generator, params, [[END, 1, 2]], 4)
    assert (prefill._cache_size(), extend._cache_size()) == before  # type: ignore[attr-defined]


def successor() -> tuple[Experiment, Any]:
    """A model whose most likely next token is always the token's number plus one."""
    config = Experiment(model=Model(depth=1, width=32, heads=2, context=16), tokenizer=Unigram(vocab_size=V))
    params = jax.tree.map(np.zeros_like, small.weights(config))
    table_VD = np.eye(V, 32, dtype=np.float32)
    params["embedding"], params["unembedding"] = table_VD, np.roll(table_VD, 1, axis=0)
    params["final_norm"] = jax.tree.map(np.ones_like, params["final_norm"])
    return config, jax.tree.map(jnp.asarray, params)


def test_a_row_that_has_ended_stays_as_it_was_while_others_go_on() -> None:
    """G08: rows that end at steps 2 and 5: the work stops at step 5, and each row's length is its own."""
    config, params = successor()
    generator = Generator(config, GREEDY, (END,))
    prompts = [[END, END - 2], [END, 0, END - 5]]
    steps = list(continue_prompts(generator, params, prompts, 9, chunk=1))
    assert len(steps) == 6 and steps[0] == [Continuation([], False)] * 2, "nothing yet, then five steps"
    assert steps[-1] == [Continuation([END - 1], True), Continuation([18, 19, 20, 21], True)]
    assert [row[0] for row in steps[2:]] == [Continuation([END - 1], True)] * 4
    assert all_of(generator, params, prompts, 9) == steps[-1]
    assert all_of(generator, params, prompts, 4)[1] == Continuation([18, 19, 20, 21], False), "the limit is no end"


def test_each_of_several_end_tokens_ends_a_row() -> None:
    """G08: two end tokens; the first is the start token as well."""
    config, params = successor()
    prompts = [[END, END - 3], [END, 0, 3]]
    found = all_of(Generator(config, GREEDY, (END, 6)), params, prompts, 9)
    assert found == [Continuation([END - 2, END - 1], True), Continuation([4, 5], True)]


def test_rows_that_only_fill_up_the_batch_never_keep_it_going() -> None:
    """G09: 3 prompts in a batch shape of 4: stops when the 3 have ended."""
    config, params = successor()
    steps = list(continue_prompts(Generator(config, GREEDY, (END,)), params, [[END, END - 2]] * 3, 12, chunk=1))
    assert len(steps) == 3 and steps[-1] == [Continuation([END - 1], True)] * 3
    text = prefill(
        Generator(config, GREEDY, (END,)),
        params,
        np.zeros((2, 2), np.int32),
        np.array([2, 1]),
        np.array([False, True]),
        16,
    )
    text = extend(Generator(config, GREEDY, (END,)), params, text, np.array([5, 4]), 9, np.uint32(0))
    assert text.lengths_B.tolist() == [5, 1], "a row that is done is not written to"


def test_lengths_and_the_context() -> None:
    """G07: context 16: 20, 16 + 1 are errors naming the numbers; 15 + 1 works; the empty prompt is the start token."""
    config = experiment()
    params, generator = weights(config), Generator(config, GREEDY, ())
    for length, new in ((20, 1), (16, 1), (15, 2), (1, 16)):
        with pytest.raises(UserError) as error:
            all_of(generator, params, [[END], [1] * length], new)
        assert all(word in str(error.value) for word in ("prompt 2" if length > 1 else "prompt 1", str(length), "16"))
        assert ("--tokens=" in str(error.value)) == (length < 16)
    last = all_of(generator, params, [[1] * 15], 1)[0].ids
    assert last == [int(plain(config, params, np.array([[1] * 15]))[0, -1].argmax())]
    full = all_of(generator, params, [[END]], 15)[0].ids
    assert full == plain(config, params, np.array([[END, *full]]))[0, :-1].argmax(-1).tolist()
    assert all_of(generator, params, [[END] * 16, [END]], 0) == [Continuation([], False)] * 2


@pytest.mark.parametrize("token", [-1, V, 10**6])
def test_an_id_outside_the_vocabulary_is_refused(token: int) -> None:
    with pytest.raises(UserError, match=f"prompt 1: holds an id outside the vocabulary of {V}"):
        all_of(Generator(experiment(), GREEDY, (END,)), None, [[END, token]], 1)


def test_neither_chunks_nor_the_cache_nor_the_company_change_a_draw() -> None:
    """The key of a draw is a function of (seed, row, place) alone."""
    config = experiment()
    params = weights(config, 0.3)
    sampling = Sampling(temperature=1.0, top_k=10, top_p=0.9, repetition_penalty=1.2)
    generator = Generator(config, sampling, (END,))
    wanted = all_of(generator, params, PROMPTS, 7, seed=5)
    for chunk in (1, 3, 7, 100):
        steps = list(continue_prompts(generator, params, PROMPTS, 7, seed=5, chunk=chunk))
        assert steps[-1] == wanted
        for early, late in itertools.pairwise(steps):
            assert all(b.ids[: len(a.ids)] == a.ids for a, b in zip(early, late, strict=True))
    uncached = dataclasses.replace(generator, use_cache=False)
    assert all_of(uncached, params, PROMPTS, 7, seed=5) == wanted
    assert all_of(uncached, params, PROMPTS, 7, seed=5, chunk=2) == wanted
    assert all_of(generator, params, PROMPTS[:1], 7, seed=5) == wanted[:1]
    assert all_of(generator, params, PROMPTS, 7, seed=6) != wanted
    assert len({tuple(row.ids) for row in all_of(generator, params, [[END]] * 4, 7, seed=5)}) > 1, "rows differ"
    assert all_of(generator, params, PROMPTS, 7, seed=(1 << 32) - 1) != wanted


def test_the_repetition_penalty_counts_the_prompt_and_what_was_drawn() -> None:
    """With a penalty beyond all logits no token comes twice, and none of the prompt."""
    config = experiment(positions=Learned())
    params = weights(config, 0.2)
    generator = Generator(config, Sampling(temperature=0.0, repetition_penalty=1e6), ())
    found = all_of(generator, params, [[END, 1, 2, 3], [END]], 12)
    text = [END, 1, 2, 3, *found[0].ids]
    logits = plain(config, params, np.array([text]))[0, 3:-1]
    for step, token in enumerate(found[0].ids):
        seen = text[: 4 + step]
        fresh = [t for t in range(V) if t not in seen]
        assert token in fresh or (logits[step][fresh] <= 0).all()
