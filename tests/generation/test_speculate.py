"""Speculative decoding: greedy gives the model's own tokens, drawing its own distribution, whatever the draft.

B rows, V vocabulary.
"""

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from scipy import stats

from tests import small
from tests.generation.test_decode import successor
from tests.generation.tiny import END, GREEDY, V, experiment, plain, quick_compiler, weights  # noqa: F401
from transformer.config import Experiment
from transformer.data.tokenizer import Bytes, ByteTokenizer, Unigram
from transformer.errors import UserError
from transformer.generation import drafts
from transformer.generation.decode import Continuation, continue_prompts
from transformer.generation.prefill import Generator
from transformer.generation.sampling import Sampling
from transformer.model import attention
from transformer.model.attention import Attention
from transformer.model.grouped import MultiHead
from transformer.model.positions import Learned, Rotary
from transformer.model.spans import Chunked, Pattern, Sliding
from transformer.parallel.mesh import Mesh
from transformer.run import Run

PROMPTS = [[END], [END, 3, 0], [END, 1, 2, 3, 4, 5, 6, 7, 8]]


def all_of(generator: Generator, params: Any, prompts: Sequence[Sequence[int]], new: int, **more: Any) -> list[Any]:
    *_, last = continue_prompts(generator, params, prompts, new, **more)
    return last


def drafted(generator: Generator, draft: Experiment, proposals: int) -> Generator:
    return dataclasses.replace(generator, draft=draft, proposals=proposals)


@pytest.mark.parametrize(
    ("attending", "positions", "new"),
    [
        # to the last place of the context
        pytest.param(Attention(span=Pattern(local=Sliding(window=3))), Learned(), 15, marks=pytest.mark.exhaustive),
        pytest.param(Attention(span=Pattern(local=Chunked(chunk=4))), Learned(), 15, marks=pytest.mark.exhaustive),
        (Attention(span=Sliding(window=3)), Rotary(), 40),  # beyond it, with a draft of a smaller window
        pytest.param(Attention(), Learned(), 15, marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
def test_greedy_gives_the_models_own_tokens(attending: Attention, positions: Any, new: int) -> None:
    """Also where nearly every proposal is turned down, so that caches go back each time; in rings what was replaced is
    still needed. On a mesh, as `sample` runs, and against the model alone, which has no cache."""
    config = experiment(attention=attending, positions=positions, context=24, depth=3)
    wide = experiment(attention=attending, positions=positions, context=24 if new == 15 else 64, depth=3)
    params, generator = weights(config), Generator(config, GREEDY, (), piece=4)
    own = drafts.first_blocks(config, params, 2, proposals=3)
    with small.on(Mesh()):
        found = all_of(drafted(generator, own.experiment, 3), params, PROMPTS, new, draft_params=own.params)
    wanted = plain(wide, params, np.array([np.pad(p + f.ids, (0, 9 - len(p))) for p, f in zip(PROMPTS, found)]))  # noqa: B905
    for b, (prompt, row) in enumerate(zip(PROMPTS, found, strict=True)):
        assert len(row.ids) == new
        assert row.ids == wanted[b].argmax(-1)[len(prompt) - 1 :][:new].tolist()
    assert 0 < sum(row.accepted for row in found) < sum(row.proposed for row in found), "both happened"


def test_a_draft_that_is_always_right_and_ends_inside_what_was_accepted() -> None:
    """The successor's own draft: five tokens a round; ends and limits cut what was accepted; rows go on alone."""
    config, params = successor()
    generator = drafted(Generator(config, GREEDY, (END,)), config, 4)
    prompts = [[END, END - 2], [END, 0, END - 5], [END, 0]]
    steps = list(continue_prompts(generator, params, prompts, 12, chunk=1, draft_params=params))
    assert [len(row[2].ids) for row in steps] == [0, 5, 10, 12]
    assert steps[-1] == [
        Continuation([END - 1], True, 4, 2),  # the end was the second of four
        Continuation([18, 19, 20, 21], True, 4, 4),  # the end came after four, from the model itself
        Continuation(list(range(1, 13)), False, 4 + 4 + 2, 4 + 4 + 2),  # the last round had room for two
    ]
    assert all_of(generator, params, prompts, 12, draft_params=params) == steps[-1], "whatever the chunk"
    assert all_of(generator, params, prompts[1:2], 3, draft_params=params) == [Continuation([18, 19, 20], False, 3, 3)]


TINY = 5  # tokens, the last of them the end


def chances(sampling: Sampling, config: Experiment, params: Any, prompt: list[int], new: int) -> dict[Any, float]:
    """Every outcome of ``new`` tokens (or fewer, to the end) and its chance, by NumPy from the model alone."""
    found = {}
    texts = {(): 1.0}
    for _ in range(new):
        more: dict[Any, float] = {}
        logits = plain(config, params, np.array([[*prompt, *text] for text in texts]))[:, -1].astype(np.float64)
        for (text, chance), row in zip(texts.items(), logits, strict=True):
            seen = np.isin(np.arange(TINY), [*prompt, *text])
            penalty = sampling.repetition_penalty
            row = np.where(seen, np.where(row > 0, row / penalty, row * penalty), row) / sampling.temperature
            if sampling.top_k:
                row = np.where(row >= np.sort(row)[-sampling.top_k], row, -np.inf)
            p = np.exp(row - row.max()) / np.exp(row - row.max()).sum()
            falling = np.argsort(-p)
            before = np.cumsum(p[falling]) - p[falling]
            p[falling[before >= sampling.top_p]] = 0
            for token in np.flatnonzero(p):
                longer = (*text, int(token))
                (found if token == TINY - 1 else more)[longer] = chance * p[token] / p.sum()
        texts = more
    return found | texts


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=0.7, top_k=3),
        pytest.param(Sampling(temperature=1.3, top_p=0.8, repetition_penalty=1.5), marks=pytest.mark.exhaustive),
        pytest.param(Sampling(temperature=1.0), marks=pytest.mark.exhaustive),
        pytest.param(Sampling(temperature=1.0, top_k=4, top_p=0.9), marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
def test_the_distribution_is_the_models_own(sampling: Sampling) -> None:
    """All outcomes of four tokens of a vocabulary of five, from 4,096 rows, against their exact chances by chi-square;
    and the same test does tell the draft's distribution from the model's."""
    config = experiment(context=8, positions=Rotary(), attention=Attention(span=Sliding(window=3)))
    config = dataclasses.replace(config, tokenizer=Unigram(vocab_size=TINY))
    params = small.weights(config, seed=1, size=0.25)
    draft = drafts.first_blocks(config, small.weights(config, seed=5, size=0.25), 1, proposals=2)
    generator = drafted(Generator(config, sampling, (TINY - 1,)), draft.experiment, 2)
    prompt, new, rows = [TINY - 1, 0, 1], 4, 4096
    outcomes = all_of(generator, params, [prompt] * rows, new, seed=11, draft_params=draft.params)
    drawn = Counter((*row.ids, TINY - 1) if row.ended else tuple(row.ids) for row in outcomes)

    def p_value(wanted: dict[Any, float]) -> float:
        assert sum(wanted.values()) == pytest.approx(1)
        expected = np.array([rows * chance for chance in wanted.values()])
        counts = np.array([drawn[outcome] for outcome in wanted])
        often = expected >= 5  # the rare ones together
        expected, counts = (np.append(x[often], x[~often].sum()) for x in (expected, counts))
        possible = expected > 0
        return 0.0 if counts[~possible].any() else float(stats.chisquare(counts[possible], expected[possible]).pvalue)

    wanted = chances(sampling, config, params, prompt, new)
    assert set(drawn) <= set(wanted) and len(wanted) > 30
    assert p_value(wanted) > 1e-3
    drafts_own = chances(sampling, draft.experiment, draft.params, prompt, new)
    assert p_value({outcome: drafts_own.get(outcome, 0) for outcome in wanted | drafts_own}) < 1e-9
    accepted = sum(row.accepted for row in outcomes) / sum(row.proposed for row in outcomes)
    assert 0.2 < accepted < 0.9


def test_a_kind_whose_cache_cannot_go_back_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    config = experiment()
    row = attention.KINDS[MultiHead]._replace(rewinds=False, cache_scales=None)
    monkeypatch.setitem(attention.KINDS, MultiHead, row)
    generator = Generator(config, GREEDY, ())
    with pytest.raises(UserError, match="--draft: the cache of multi_head attention cannot turn down"):
        all_of(drafted(generator, config, 2), None, [[END]], 1)
    with pytest.raises(UserError, match="--int8_cache: the cache of multi_head attention has no int8 form"):
        all_of(dataclasses.replace(generator, int8=True), None, [[END]], 1)


def test_a_draft_that_cannot_be_one_is_refused(tmp_path: Any) -> None:
    config = experiment(attention=Attention(span=Pattern()), depth=4)
    params = small.weights(config)
    assert drafts.first_blocks(config, params, 3, 1).experiment.model.depth == 3
    for count in (0, -1, 4, 5):
        with pytest.raises(UserError, match=f"--draft_blocks: {count} of 4 blocks; set 1 to 3"):
            drafts.first_blocks(config, params, count, 1)
    with pytest.raises(UserError, match=r"--draft_blocks: 1 blocks alone are no model: .*a pattern of 2 blocks"):
        drafts.first_blocks(config, params, 1, 1)
    one = experiment(depth=1)
    with pytest.raises(UserError, match="a model of one block has no smaller one in it"):
        drafts.first_blocks(one, small.weights(one), 1, 1)
    with pytest.raises(UserError, match="--proposals: 0"):
        drafts.first_blocks(config, params, 2, 0)
    run = Run(tmp_path, Experiment(tokenizer=Bytes()), ByteTokenizer())
    other = dataclasses.replace(run, tokenizer=ByteTokenizer())
    other.tokenizer.fingerprint = "another"  # type: ignore[misc]
    with pytest.raises(UserError, match="has another tokenizer"):
        drafts.of_run(run, other, 4)
    short = experiment(context=8)
    with pytest.raises(UserError, match=r"--draft: 9 tokens .* and 2 new ones exceed its context of 8"):
        all_of(drafted(Generator(experiment(), GREEDY, ()), short, 2), None, PROMPTS, 2)


def test_a_block_in_a_loop_drafts_for_the_loop() -> None:
    config = experiment(loops=2, depth=1)
    draft = drafts.first_blocks(config, small.weights(config), 1, 2)
    assert (draft.experiment.model.depth, draft.experiment.model.loops, draft.proposals) == (1, 1, 2)
    assert draft.experiment.vocab_size == V
