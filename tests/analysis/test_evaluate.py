"""Evaluation: every token once, sums divided once, and the same as a slow reference."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import small
from transformer.analysis.compressors import compressed
from transformer.analysis.evaluate import Score, Window, _rows, evaluate, spread, total, windows
from transformer.analysis.validation import validator
from transformer.config import Experiment
from transformer.data.documents import Documents, Encoded, encode, token_sizes
from transformer.data.prepare import Data, prepare
from transformer.data.tokenizer import Bpe, Bytes, ByteTokenizer, Imported, Unigram
from transformer.errors import UserError
from transformer.model.masks import causal
from transformer.model.transformer import Transformer

CONTEXT, V = 8, 23
LENGTHS = [1, 5, 8, 0, 13, 20]


@dataclasses.dataclass
class Model:
    """A small random model and documents to score with it."""

    experiment: Experiment
    params: Any
    documents: Encoded
    token_bytes: np.ndarray


@pytest.fixture(scope="module")
def model() -> Model:
    experiment = small.experiment(vocab=V, context=CONTEXT)
    random = np.random.default_rng(0)
    documents = Encoded([np.r_[V - 1, random.integers(0, V - 1, n)].astype(np.int32) for n in LENGTHS])
    params = jax.tree.map(jnp.asarray, small.weights(experiment, size=0.5))
    return Model(experiment, params, documents, random.integers(1, 5, V))


def scored_by(found: list[Window], document: int) -> list[int]:
    """Which tokens of a document its windows score, in order."""
    own = [w for w in found if w.document == document]
    return [t for w in own for t in range(w.start + w.length - w.scored, w.start + w.length)]


@settings(deadline=None)
@given(st.lists(st.integers(0, 60), max_size=5), st.integers(1, 12), st.integers(1, 12))
def test_every_token_is_scored_exactly_once(lengths: list[int], context: int, stride: int) -> None:
    stride = min(stride, context)
    found = windows(lengths, context, stride)
    for document, length in enumerate(lengths):
        assert scored_by(found, document) == list(range(length))
    assert all(1 <= w.scored <= w.length <= context and w.start % stride == 0 for w in found)
    for w in found:  # all but the first window's tokens are predicted from enough
        assert w.start == 0 or w.length - w.scored >= min(context - stride, w.length - 1)


@pytest.mark.parametrize("stride", [4, 8])
def test_a_document_longer_than_the_window(stride: int) -> None:
    """E04: document 12, window 8, stride 4 and 8: 12 tokens scored exactly once each."""
    found = windows([12], 8, stride)
    assert scored_by(found, 0) == list(range(12)) and len(found) == 2
    assert [(w.start, w.length, w.scored) for w in found] == [(0, 8, 8), (stride, 12 - stride, 4)]


@pytest.mark.parametrize("stride", [0, -1, 9])
def test_a_stride_that_leaves_tokens_out_is_refused(stride: int) -> None:
    with pytest.raises(UserError, match=f"^--stride: {stride} is not between 1 and the context of 8"):
        windows([12], 8, stride)


def test_n_minus_one_tokens_are_fed_to_score_n() -> None:
    """E03: context 3, continuation 3: 5 inputs, 3 scores, from positions 2, 3, 4."""
    ids = np.array([10, 11, 12, 13, 14, 15], np.int32)
    tokens_BT, targets_BT, weights_BT = _rows([Window(0, 0, 5, 3)], Encoded([ids]), 8)
    assert tokens_BT[0, :5].tolist() == [10, 11, 12, 13, 14]
    assert np.flatnonzero(weights_BT[0]).tolist() == [2, 3, 4]
    assert targets_BT[0, 2:5].tolist() == [13, 14, 15]


def test_windows_are_spread_evenly_and_always_the_same() -> None:
    found = windows([100], 8, 4)
    assert spread(found, None) == spread(found, 1000) == found
    assert [w.start for w in spread(found, 3)] == [0, 32, 64] and spread(found, 3) == spread(found, 3)


def slow(model: Model, stride: int) -> list[tuple[float, int, int, int]]:
    """The same figures by scoring one token at a time with the model alone, summed in float64."""

    @small.jit
    def last(params: Any, tokens_T: jax.Array, at: jax.Array) -> jax.Array:
        index_1T = jnp.arange(CONTEXT)[None]
        net = Transformer(model.experiment.model, V)
        return net.apply({"params": params}, tokens_T[None], index_1T, causal(CONTEXT))[0][0, at]

    out = []
    for ids in (model.documents[i] for i in range(len(model.documents))):
        nats = hits = size = 0.0
        for t in range(1, len(ids)):  # the earliest window start, a multiple of the stride, that reaches token t
            start = next(s for s in range(0, len(ids), stride) if t <= s + CONTEXT)
            tokens = np.zeros(CONTEXT, np.int32)
            tokens[: t - start] = ids[start:t]
            logits = np.asarray(last(model.params, tokens, t - start - 1), np.float64)
            nats += np.log(np.exp(logits).sum()) - logits[ids[t]]
            hits += logits.argmax() == ids[t]
            size += model.token_bytes[ids[t]]
        out.append((float(nats), len(ids) - 1, int(size), int(hits)))
    return out


@pytest.mark.parametrize("stride", [1, 3, 8])
def test_the_same_as_scoring_token_by_token(model: Model, stride: int) -> None:
    """E02: also the first token, which is predicted from the start token; E04, L07."""
    found = evaluate(model.experiment, model.params, model.documents, model.token_bytes, stride=stride)
    for score, (nats, tokens, size, hits) in zip(found, slow(model, stride), strict=True):
        assert (score.tokens, score.bytes, score.correct) == (tokens, size, hits)
        assert score.nats == pytest.approx(nats, rel=1e-5, abs=1e-5)
    assert found[LENGTHS.index(0)] == Score(0.0, 0, 0, 0)


@pytest.mark.parametrize("rows", [1, 2, 5, 16])
def test_the_batch_size_changes_nothing(model: Model, rows: int) -> None:
    """L07: also where the last batch is not full."""

    def loss(rows: int) -> float:
        found = evaluate(model.experiment, model.params, model.documents, model.token_bytes, stride=3, rows=rows)
        assert total(found).tokens == sum(LENGTHS)
        return float(total(found).report()["loss"])

    assert loss(rows) == pytest.approx(loss(3), rel=1e-6)


def test_sums_are_divided_once() -> None:
    """L07: batches of 10 and 100 tokens with losses 2 and 5: 4.727. L09: perplexity is exp of the mean."""
    report = total([Score(20.0, 10, 30, 1), Score(500.0, 100, 300, 10)]).report()
    assert report["loss"] == pytest.approx(4.727, abs=5e-4) == 520 / 110
    assert report["accuracy"] == pytest.approx(0.1) and report["tokens"] == 110
    assert report["bits_per_byte"] == pytest.approx(520 / math.log(2) / 330)
    assert total([Score(0.0, 1, 1, 1), Score(2.0, 1, 1, 0)]).report()["perplexity"] == pytest.approx(2.718, abs=5e-4)
    assert Score(1e9, 1, 1, 0).report()["perplexity"] == math.inf


def test_the_bits_per_byte_of_a_uniform_model() -> None:
    """E05: uniform over 256 ids, 10 bytes of text in 4 tokens: 3.2 bits per byte, 8 bits a token."""
    experiment = dataclasses.replace(small.experiment(context=CONTEXT), tokenizer=Unigram(vocab_size=256))
    params = jax.tree.map(jnp.zeros_like, small.weights(experiment))
    sizes = np.zeros(256, np.int64)
    sizes[[1, 2, 3, 4]] = [1, 2, 3, 4]
    [score] = evaluate(experiment, params, Encoded([np.array([0, 1, 2, 3, 4], np.int32)]), sizes, stride=4)
    report = score.report()
    assert (report["tokens"], report["bytes"]) == (4, 10)
    assert report["bits_per_byte"] == pytest.approx(3.2, abs=1e-6)
    assert report["perplexity"] == pytest.approx(256, rel=1e-5)


@pytest.mark.parametrize("tokenizer", [Bytes(), Bpe(vocab_size=290)], ids=["bytes", "bpe"])
def test_validation_documents_are_the_source_bytes(tmp_path: Path, tokenizer: Any) -> None:
    """Pieces are put together again; nothing of the end and start tokens between them is left."""
    texts = {f"{i}.txt": f"caf\u00e9 {i} and the cat sat on a mat. \u2581 x</s>y\n" * (i + 3) for i in range(12)}
    for name, text in texts.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    data = Data(source=str(tmp_path), validation=0.4, piece_bytes=64)
    prepared = prepare(data, tokenizer, tmp_path / "cache")
    documents = Documents(prepared.validation, prepared.tokenizer.end_id)
    sizes = token_sizes(prepared.tokenizer)
    found = [documents[i] for i in range(len(documents))]
    assert len(found) == 5
    for ids, length in zip(found, documents.lengths, strict=True):
        assert ids[0] == prepared.tokenizer.end_id and (ids[1:] != prepared.tokenizer.end_id).all()
        text = prepared.tokenizer.decode_bytes(ids[1:])
        assert text.decode() in texts.values() and len(ids) == length + 1 and sizes[ids].sum() == len(text)
        again = encode(prepared.tokenizer, text, 64)
        assert again.tolist() == ids.tolist(), "a user's text is cut and encoded as the run's was"
    assert len({ids.tobytes() for ids in found}) == 5


@pytest.mark.parametrize("count", [None, 3])
def test_a_run_is_validated_per_byte_of_the_source(tmp_path: Path, count: int | None) -> None:
    """Tokens that stand for two bytes each, of a source that has three for each: a blank is lost."""
    random = np.random.default_rng(0)
    for i in range(9):
        (tmp_path / "text").mkdir(exist_ok=True)
        (tmp_path / "text" / f"{i}.txt").write_text("".join(f"{d}  " for d in random.integers(0, 10, 9 + i)))
    given = Data(source=str(tmp_path / "text"), validation=0.4)
    tokenizer = Imported(path=str(tmp_path), format="ids", vocab_size=V, start_id=V - 1, end_ids=(V - 1,))
    experiment = dataclasses.replace(small.experiment(vocab=V, context=CONTEXT), data=given, tokenizer=tokenizer)
    prepared = prepare(given, tokenizer, tmp_path / "cache")
    params = jax.tree.map(jnp.asarray, small.weights(experiment))
    report = validator(experiment, prepared)(params, count=count)
    assert report["bytes"] == 3 * report["tokens"] > 0
    assert report["bits_per_byte"] == pytest.approx(report["loss"] / math.log(2) / 3)
    documents = Documents(prepared.validation, V - 1)
    assert documents.sources == [3 * n for n in documents.lengths] and documents.bytes == sum(documents.sources)
    assert (report["tokens"] == sum(documents.lengths)) is (count is None)


def test_the_held_out_end_of_a_single_document_is_its_last_bytes(tmp_path: Path) -> None:
    text = "".join(f"line {i}\n" for i in range(200))
    (tmp_path / "one.txt").write_text(text)
    prepared = prepare(Data(source=str(tmp_path / "one.txt"), piece_bytes=128), Bytes(), tmp_path / "cache")
    documents = Documents(prepared.validation, prepared.tokenizer.end_id)
    assert len(documents) == 1
    held = prepared.tokenizer.decode(documents[0])
    assert text.endswith(held) and 0.05 < len(held) / len(text) < 0.25
    trained = Documents(prepared.train, prepared.tokenizer.end_id)
    assert prepared.tokenizer.decode(trained[0]) + held == text


def test_compressors_are_the_yardstick() -> None:
    text = b"the cat sat on the mat. " * 400
    found = compressed([text[:100], text[100:]])
    assert found["compressed_bytes"] == len(text)
    assert 0 < found["gzip_bits_per_byte"] < 0.2 and 0 < found["xz_bits_per_byte"] < 0.2
    noise = np.random.default_rng(0).bytes(4096)
    assert compressed([noise])["gzip_bits_per_byte"] > 8


def test_bytes_have_the_sizes_of_bytes() -> None:
    assert token_sizes(ByteTokenizer()).tolist() == [1] * 256 + [0]
