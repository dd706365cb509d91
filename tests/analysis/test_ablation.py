"""What `ablate` takes out, against the NumPy oracle with weights that were cut by hand; its intervals and scores."""

import copy
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import small
from tests.model import oracle
from tests.page import Page
from transformer.analysis import ablation
from transformer.analysis.ablation import Resampling, ablate, words
from transformer.analysis.ablation_figure import block_cells, cells, figure, sentence
from transformer.analysis.evaluate import windows
from transformer.data.documents import Encoded
from transformer.errors import UserError
from transformer.model.attention import Attention
from transformer.model.grouped import Grouped, GroupedAttention
from transformer.pages import drawn, inline
from transformer.settings import override

V, CONTEXT = 23, 6
SIZES = np.r_[np.random.default_rng(1).integers(1, 5, V), 0]  # bytes of each token; the last is the start token
VARIANTS: dict[str, dict[str, Any]] = {
    "plain, written out": {"depth": 3, "bias": True, "stack": "unroll"},
    "sandwich in a scan": {
        "depth": 3,
        "bias": True,
        "stack": "scan",
        "norms": "sandwich",
        "attention": Attention(projection=Grouped(kv_heads=1), gate=True),
    },
    "post, in loops": {"depth": 2, "norms": "post", "loops": 2, "stack": "scan", "remat": "full"},
}


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_changed_rows", "_gradient", "_lengths", "_induction"):
        function = getattr(ablation, name).__wrapped__
        monkeypatch.setattr(ablation, name, small.jit(function, static_argnums=0))


def documents(*lengths: int) -> Encoded:
    random = np.random.default_rng(0)
    return Encoded([np.r_[V, random.integers(0, V, n)].astype(np.int32) for n in lengths or (2, 9, 5, 14)])


def experiment(**model: Any) -> Any:
    return small.experiment(vocab=V + 1, **{"context": CONTEXT, "heads": 2, "width": 8, "depth": 2} | model)


def nats(model: Any, params: Any, texts: Encoded | None = None) -> float:
    """Summed nats of all windows, by the oracle."""
    found = 0.0
    texts = texts or documents()
    for w in windows(texts.lengths, CONTEXT, CONTEXT // 2):
        ids = texts[w.document][w.start : w.start + w.length + 1]
        logits = oracle.document_logits(model, params, ids[:-1])
        losses = np.log(np.exp(logits).sum(-1)) - logits[np.arange(w.length), ids[1:]]
        found += losses[w.length - w.scored :].sum()
    return float(found)


def cut_by_hand(model: Any, params: Any, one: dict[str, Any]) -> tuple[Any, Any]:
    """The model and weights that a change leaves, by other means than masks: weights set to zero, blocks left out."""
    i, depth = one["block"] - 1, model.depth
    params = copy.deepcopy(params)
    blocks = params["blocks"]

    def silence(branch: str, *names: str) -> None:
        for layer in [blocks[branch][names[0]], blocks.get(f"{branch}_norm_after", {})]:
            for w in layer.values():
                w[i] = 0

    if one["kind"] == "attention":
        silence("attention", "out")
    if one["kind"] == "mlp":
        silence("mlp", "down")
    if one["kind"] == "head":
        blocks["attention"]["out"]["w"][i, one["head"] - 1] = 0
    order = list(range(depth))
    if one["kind"] == "swap":
        order[i], order[i + 1] = i + 1, i
    if one["kind"] == "block":
        order.remove(i)
    if one["kind"] == "cut":
        order = order[:i]
    params["blocks"] = jax.tree.map(lambda w: w[order], blocks)
    return dataclasses.replace(model, depth=len(order)), params


MORE = [pytest.param(name, marks=pytest.mark.exhaustive) for name in list(VARIANTS)[1:]]


@pytest.mark.parametrize("name", [next(iter(VARIANTS)), *MORE])
def test_every_change_is_what_it_says(name: str) -> None:
    """Bits per byte of every change, to 1e-5; one compiled program serves them all."""
    e = experiment(**VARIANTS[name])
    params = small.weights(e, size=0.7)
    compiled = ablation._changed_rows._cache_size()
    found = ablate(e, jax.tree.map(jnp.asarray, params), documents(), SIZES, count=None)
    assert ablation._changed_rows._cache_size() == compiled + 1
    texts = documents()
    size = sum(SIZES[texts[i][1:]].sum() for i in range(len(texts)))
    assert (found["bytes"], found["tokens"]) == (size, sum(texts.lengths))
    whole = nats(e.model, params) / np.log(2) / size
    assert found["bits_per_byte"] == pytest.approx(whole, abs=1e-5)
    depth, heads = e.model.depth, e.model.heads
    kinds = [one["kind"] for one in found["changes"]]
    assert {kind: kinds.count(kind) for kind in kinds} == {
        **{"block": depth, "attention": depth, "mlp": depth, "cut": depth},
        **{"head": depth * heads, "swap": depth - 1},
    }
    for one in found["changes"]:
        wanted = nats(*cut_by_hand(e.model, params, one)) / np.log(2) / size
        assert one["bits_per_byte"] == pytest.approx(wanted, abs=2e-5), words(one)
        assert one["difference"] == pytest.approx(wanted - whole, abs=2e-5), words(one)
        assert one["low"] <= one["difference"] <= one["high"]
    assert len({round(one["difference"], 6) for one in found["changes"]}) > len(kinds) // 2
    check_scores(e, params, found)
    for text in (sentence({"text": "a text", "step": 1} | found), *(row[0] for row in cells(found))):
        assert "None" not in text
    page = Page(inline(drawn(figure(found)), "x-"))
    assert page.elements[0][0] == "svg" and len(block_cells(found)) == depth * e.model.loops


def check_scores(e: Any, params: Any, found: dict[str, Any]) -> None:
    """Lengths and previous-token scores on the text, induction on random tokens, by loops over the oracle's maps."""
    texts = documents()
    rows = [texts[w.document][w.start : w.start + w.length] for w in windows(texts.lengths, CONTEXT, CONTEXT)]
    stream, before = np.zeros(e.model.depth * e.model.loops), np.zeros((e.model.depth * e.model.loops, e.model.heads))
    for ids in rows:
        seen = oracle.Seen()
        oracle.document_logits(e.model, params, ids, seen)
        stream += np.linalg.norm(seen.streams[1:], axis=-1).sum(-1)
        for p, table in enumerate(seen.weights):
            for t in range(1, len(ids)):
                before[p] += table[:, t, t - 1]
    tokens = sum(map(len, rows))
    assert [b["residual_norm"] for b in found["blocks"]] == pytest.approx((stream / tokens).tolist(), rel=1e-4)
    wanted = before / (tokens - len(rows))
    assert [b["previous_token"] for b in found["blocks"]] == [pytest.approx(x, abs=1e-5) for x in wanted.tolist()]
    n = (CONTEXT - 1) // 2
    rng = np.random.default_rng(ablation.SEED)
    drawn = rng.choice([i for i in range(V + 1) if SIZES[i] > 0], (ablation.REPEATED, n))
    wanted = np.zeros_like(before)
    for one in drawn:
        seen = oracle.Seen()
        oracle.document_logits(e.model, params, np.r_[V, one, one], seen)
        for p, table in enumerate(seen.weights):
            for t in range(n + 1, 2 * n + 1):  # the second time of token t - n, which was followed by t - n + 1
                wanted[p] += table[:, t, t - n + 1] / n / len(drawn)
    assert [b["induction"] for b in found["blocks"]] == [pytest.approx(x, abs=1e-5) for x in wanted.tolist()]


def test_the_gradient_of_a_block_is_that_of_the_loss() -> None:
    """By central differences of the float64 oracle, over every weight of the block."""
    e = experiment(width=4, depth=2)
    e = override(e, {"model.mlp.width": 3})
    params = small.weights(e, size=0.7)
    given: Any = {"stride": CONTEXT // 2, "count": None}
    texts = documents(2, 7)
    found = ablation.gradient_norms(e, jax.tree.map(jnp.asarray, params), texts, SIZES, given)
    wide = jax.tree.map(lambda w: w.astype(np.float64), params)
    square, step = 0.0, 1e-5
    for w in jax.tree.leaves(wide["blocks"]):
        for place in np.ndindex(w.shape[1:]):
            at, kept = (1, *place), w[(1, *place)]
            w[at] = kept + step
            up = nats(e.model, wide, texts)
            w[at] = kept - step
            square += ((up - nats(e.model, wide, texts)) / (2 * step)) ** 2
            w[at] = kept
    assert found[1] == pytest.approx(np.sqrt(square) / 9, rel=1e-4)
    assert found[0] != pytest.approx(found[1], rel=1e-3)


def test_intervals_come_from_drawing_whole_units() -> None:
    """Of many independent windows: the mean and 1.96 standard errors. Windows of one document go together."""
    random = np.random.default_rng(3)
    values = random.normal(0.3, 2.0, 400)
    mean, low, high = Resampling(list(range(400))).ratio(values, np.ones(400))
    error = 1.96 * values.std() / 20
    assert mean == pytest.approx(values.mean()) and low == pytest.approx(mean - error, abs=0.1 * error)
    assert high == pytest.approx(mean + error, abs=0.1 * error)
    doubled = Resampling([i // 2 for i in range(800)]).ratio(np.repeat(values, 2), np.ones(800))
    assert doubled == pytest.approx((mean, low, high)), "twice the windows of the same documents tell nothing new"
    assert Resampling([4, 4]).ratio(np.array([1.0, 2.0]), np.array([2.0, 4.0])) == (0.5, None, None)


def test_heads_that_cannot_be_told_apart_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def merged(self: Any, x_BTD: jax.Array, *rest: Any) -> tuple[jax.Array, None]:
        return x_BTD, None

    monkeypatch.setattr(GroupedAttention, "__call__", merged)
    e = experiment()
    with pytest.raises(UserError, match="the heads of multi_head cannot be taken out one by one"):
        ablate(e, small.weights(experiment()), documents(), SIZES, count=None)
