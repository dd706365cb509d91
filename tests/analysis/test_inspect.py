"""What `inspect` shows, against the NumPy oracle in float64; and prompts that hurt."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import small
from tests.model import oracle
from tests.model.variants import model_name, pairwise, settings
from transformer.analysis import inspection
from transformer.analysis.inspect_page import packed
from transformer.analysis.inspect_terminal import drawn
from transformer.analysis.inspection import Inspection, as_dict, inspect, tokens_of
from transformer.data.tokenizer import Bytes, ByteTokenizer
from transformer.errors import UserError
from transformer.model.attention import Attention
from transformer.model.differential import Differential
from transformer.model.grouped import Grouped
from transformer.model.latent import Latent
from transformer.model.linear import Linear, LinearAttention
from transformer.model.mlp import Swiglu
from transformer.model.norms import RmsNorm
from transformer.model.positions import Alibi, Learned, Relative, Rotary
from transformer.model.scores import Sigmoid, Softmax
from transformer.model.spans import Pattern, Sliding
from transformer.run import Run

PASS = inspection._pass.__wrapped__
PROMPT = "a cat é"  # with the start: 9 tokens of bytes
# Each part of the view once; the pairs of all kinds are `exhaustive`.
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "windows, rotary, loops": {
        "positions": Rotary(base=50.0),
        "loops": 2,
        "norms": "sandwich",
        "norm": RmsNorm(),
        "mlp": Swiglu(),
        "attention": Attention(span=Pattern(local=Sliding(window=3)), projection=Grouped(), qk_norm="head", gate=True),
    },
    "sigmoids, distances, post": {
        "positions": Relative(buckets=4, farthest=6),
        "attention": Attention(scores=Sigmoid(bias=0.5), kernel="plain"),
        "norms": "post",
        "logits_soft_cap": 2.0,
        "tie_embeddings": True,
        "stack": "scan",
    },
    "differences": {"positions": Rotary(), "attention": Attention(projection=Differential(), span=Sliding(window=4))},
    "states": {"loops": 2, "attention": Attention(projection=Linear(), gate=True)},
    "latent": {"positions": Rotary(), "attention": Attention(projection=Latent(kv_rank=6, rope_width=4))},
    "sinks, slopes, side by side": {
        "positions": Alibi(),
        "parallel": True,
        "norms": "peri",
        "final_norm": False,
        "bias": True,
        "attention": Attention(scores=Softmax(sinks=True, soft_cap=1.5), kernel="blockwise"),
    },
}


def run_of(directory: Path = Path("run"), context: int = 12, **model: Any) -> tuple[Run, Any]:
    """A run that was never trained, with random weights."""
    e = dataclasses.replace(small.experiment(**{"context": context} | model), tokenizer=Bytes())
    return Run(directory, e, ByteTokenizer()), jax.tree.map(jnp.asarray, small.weights(e, size=0.7))


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    fast = small.jit(PASS, static_argnums=0)
    monkeypatch.setattr(inspection, "_pass", fast)


def softmax(logits: np.ndarray) -> np.ndarray:
    e = np.exp(logits - logits.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def check(found: Inspection, params: Any) -> None:
    """Attention weights, lens and distribution to 1e-5, lengths to a share of 1e-5."""
    ids = np.array([token.id for token in found.tokens])
    seen = oracle.Seen()
    oracle.document_logits(found.model, params, ids, seen)
    assert np.abs(found.weights_PNTS - np.array(seen.weights)).max() < 1e-5
    assert small.far(found.stream_QT, np.linalg.norm(seen.streams, axis=-1)) < 1e-5
    p_QTV = softmax(np.array(seen.said))
    assert len(found.said.ids) == len(p_QTV) == found.model.depth * found.model.loops + 1
    at = np.take_along_axis(p_QTV, found.said.ids, -1)
    assert np.abs(found.said.probabilities - at).max() < 1e-5
    largest = np.sort(p_QTV, -1)[..., ::-1][..., : inspection.MOST]
    assert np.abs(found.said.probabilities - largest).max() < 1e-5
    assert small.far(found.said.entropy, -(p_QTV * np.log2(p_QTV)).sum(-1)) < 1e-5
    true_QT = np.take_along_axis(p_QTV[:, :-1], ids[None, 1:, None], -1)[..., 0]
    assert np.abs(found.said.next_probability[:, :-1] - true_QT).max() < 1e-5
    most, least = ((p_QTV[:, :-1] > true_QT[..., None] * (1 + by)).sum(-1) for by in (-1e-5, 1e-5))  # ties to rounding
    assert (least + 1 <= found.said.next_rank[:, :-1]).all() and (found.said.next_rank[:, :-1] <= most).all()
    assert (found.said.next_rank[:, -1] == 0).all()
    if found.model.norms != "post":
        # Both branches' additions make up the difference of the stream.
        gap = np.linalg.norm(np.diff(seen.streams, axis=0), axis=-1)
        assert (gap <= found.attention_PT + found.mlp_PT + 1e-4).all()
        assert (gap >= np.abs(found.attention_PT - found.mlp_PT) - 1e-4).all()


FIRST = ("windows, rotary, loops", "sinks, slopes, side by side", "differences", "states")
MORE = [pytest.param(name, marks=pytest.mark.exhaustive) for name in VARIANTS if name not in FIRST]


@pytest.mark.parametrize("name", [*FIRST, *MORE])
def test_what_is_shown_is_the_oracles(name: str) -> None:
    run, params = run_of(**VARIANTS[name])
    check(inspect(run, params, 3, PROMPT), params)


@pytest.mark.exhaustive
@pytest.mark.parametrize("variant", pairwise(), ids=model_name)
def test_what_is_shown_of_every_kind_is_the_oracles(variant: dict[str, Any]) -> None:
    run, params = run_of(**settings(variant))
    check(inspect(run, params, 3, PROMPT), params)


def test_a_kind_says_whether_only_proportions_count(monkeypatch: pytest.MonkeyPatch) -> None:
    run, params = run_of(attention=Attention(projection=Linear()))
    proportions = inspect(run, params, 3, PROMPT).weights_PNTS
    monkeypatch.setattr(LinearAttention, "normed", False)
    monkeypatch.setattr(inspection, "_pass", small.jit(lambda *a: PASS(*a), static_argnums=0))  # traced anew
    weights = inspect(run, params, 3, PROMPT).weights_PNTS
    sizes = np.abs(weights).sum(-1, keepdims=True)
    np.testing.assert_allclose(weights / sizes, proportions, atol=1e-5)
    assert np.abs(sizes - 1).max() > 0.1


@pytest.fixture(scope="module")
def plain() -> tuple[Run, Any]:
    return run_of(context=64)


HURTS = {
    "empty": "",
    "one": "x",
    "end of text": "</s>",
    "markup": "<script>alert(1)</script><b>&amp;",
    "emoji": "👩\u200d🚀é",
    "right to left": "שלום \u202e abc",
    "nothing": "\x00\x00",
    "newlines": "\n\n\n",
    "words for a terminal": "[bold]\x1b[31m\\[",
}


@pytest.mark.parametrize("name", HURTS)
def test_prompts_that_hurt(plain: tuple[Run, Any], name: str) -> None:
    """Every byte is in exactly one token, in the JSON, on the page and in the terminal; nothing acts on a terminal."""
    prompt = HURTS[name]
    found = inspect(*plain, 3, prompt + " " * (63 - len(prompt.encode())) if prompt else prompt)
    whole = b"".join(token.content for token in found.tokens)
    assert whole == found.prompt.encode()
    assert [token.start for token in found.tokens[1:]] == [token.end for token in found.tokens[:-1]]
    for token in found.tokens[1:]:
        assert (token.text is None) != (token.of is None)
        around = token.text if token.of is None else token.of
        assert token.content in around.encode()
    result = json.loads(json.dumps(as_dict(found), allow_nan=False))
    assert [len(row) for row in result["blocks"][0]["attention"][0]] == list(range(1, len(found.tokens) + 1))
    assert result["distribution"][-1]["next"] is None and len(result["distribution"]) == len(found.tokens)
    assert json.dumps(packed(found), allow_nan=False)
    text = drawn(found, len(found.tokens) - 1, colour=False)
    assert "\x1b" not in text and "\x00" not in text and "\u202e" not in text
    assert "[bold]" in text.replace(" ", "") or "bold" not in prompt


def test_tokens_that_are_not_the_prompts_bytes() -> None:
    """What an imported tokenizer adds (a blank) and leaves out, and bytes that are no character."""

    class Adds:
        def token_bytes(self, i: int) -> bytes:
            return [b"", b" To", b" be", b"\xf0\x9f", b"\xff"][i]

    found = tokens_of(Adds(), np.array([0, 1, 2, 3, 4]))  # type: ignore[arg-type]
    assert [(t.text, t.start, t.end) for t in found[:3]] == [(None, 0, 0), (" To", 0, 3), (" be", 3, 6)]
    assert [(t.text, t.content) for t in found[3:]] == [(None, b"\xf0\x9f"), (None, b"\xff")]


def test_a_prompt_longer_than_the_context_is_refused_with_both_lengths(plain: tuple[Run, Any]) -> None:
    assert len(inspect(*plain, 3, "x" * 63).tokens) == 64
    with pytest.raises(UserError, match=r"--prompt: 65 tokens .* exceed the context of 64 of run; shorten it"):
        inspect(*plain, 3, "x" * 64)


def test_positions_are_told_as_what_they_are() -> None:
    """An added vector, angles, slopes or a table, each with what the model computes with."""
    for kind, name in ((Learned(), "added"), (Rotary(base=50.0), "speeds"), (Alibi(), "slopes"), (Relative(), "table")):
        run, params = run_of(positions=kind)
        places = inspection.positions_of(run.experiment.model, params, 9)
        assert (name in places) == (name != "added") and places["without"] == []
    table = np.array(places["table"])
    assert table.shape == (2, 32, 4) and len(places["buckets"]) == 9
    span = Pattern(local=Sliding(window=3), rotate_global=False)
    run, params = run_of(positions=Rotary(base=50.0), attention=Attention(span=span), depth=3)
    places = inspection.positions_of(run.experiment.model, params, 9)
    assert places["without"] == [1] and places["speeds"] == pytest.approx([1, 50**-0.5])
