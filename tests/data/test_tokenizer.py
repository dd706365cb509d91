"""Tokenizers: lossless for any text, special ids only where asked, errors in one line."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.data.conftest import prose
from transformer.data import tokenizer_training
from transformer.data.tokenizer import (
    HOSTILE,
    Bpe,
    Bytes,
    ByteTokenizer,
    SentencePieceTokenizer,
    Tokenizer,
    Unigram,
    load,
)
from transformer.data.tokenizer_training import train
from transformer.errors import UserError

KINDS = ("bytes", "bpe", "unigram")
TRICKY = [
    "a  b",
    " a",
    "a ",
    "a\nb",
    "\ufb01x",
    "\u00bd",
    "caf\u00e9",
    "foo \U0001f600\n bar   ",
    "x</s>y<s>z",
]
TRICKY += [
    "<0x0A>",
    "<unk>",
    "\u2581",
    " \u2581 \u2581\u2581",
    "\u2585",
    "\x00",
    "\r\n\t",
    " " * 3000,
    "\n" * 3000,
]


@pytest.fixture(params=KINDS)
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return ByteTokenizer() if request.param == "bytes" else request.getfixturevalue(request.param)


@pytest.mark.parametrize("text", [*HOSTILE, *TRICKY])
def test_T01_T02_T06_T07_round_trip(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert ids.dtype == np.int32 and ids.ndim == 1
    assert tokenizer.decode_bytes(ids) == text.encode()
    assert tokenizer.decode(ids) == text
    assert b"".join(tokenizer.token_bytes(i) for i in ids.tolist()) == text.encode()
    assert tokenizer.end_id not in ids and (isinstance(tokenizer, ByteTokenizer) or 0 not in ids)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=60))
@example(text="\u2581")
def test_T01_round_trip_of_any_text(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode_bytes(ids) == text.encode()
    assert tokenizer.end_id not in ids


def test_every_code_point_of_the_first_plane(tokenizer: Tokenizer) -> None:
    letters = [chr(c) for c in range(0x10000) if not 0xD800 <= c < 0xE000]
    text = "".join(letters) + " ".join(letters[:3000])
    assert tokenizer.decode_bytes(tokenizer.encode(text)) == text.encode()


def test_T11_no_blank_is_added_in_front(tokenizer: Tokenizer) -> None:
    parts = [*tokenizer.encode("ab"), *tokenizer.encode("cd")]
    assert tokenizer.decode(parts) == "abcd"
    assert tokenizer.decode(tokenizer.encode(" the cat")[-1:])[:1] != ""


def test_T08_encode_adds_no_start_and_batches_agree(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("").size == 0
    texts = ["the cat", "", "\u2581 a \u2581", *HOSTILE]
    for one, many in zip(map(tokenizer.encode, texts), tokenizer.encode_batch(texts), strict=True):
        np.testing.assert_array_equal(one, many)


def test_lone_surrogates_are_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(UserError, match=r"U\+D800 at character 3"):
        tokenizer.encode("abc\ud800")


def test_ids_outside_the_vocabulary_are_refused(tokenizer: Tokenizer) -> None:
    for wrong in (-1, tokenizer.vocab_size):
        with pytest.raises(UserError, match=f"id {wrong} is outside the vocabulary of {tokenizer.vocab_size}"):
            tokenizer.decode([wrong])
        with pytest.raises(UserError, match="outside"):
            tokenizer.token_bytes(wrong)


def test_partial_letters_and_special_ids_decode(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("\u05d0")
    assert tokenizer.decode(ids[:1]) == "\ufffd"
    assert tokenizer.decode_bytes([tokenizer.end_id]) == b""
    assert tokenizer.describe(tokenizer.end_id) == "<end of text>"
    assert tokenizer.describe(int(ids[0])) == "<0xD7>"
    assert tokenizer.describe(int(tokenizer.encode(" ")[0])) == "' '"


def test_save_and_load(tokenizer: Tokenizer, tmp_path: Path) -> None:
    config = Bytes() if isinstance(tokenizer, ByteTokenizer) else Bpe()
    tokenizer.save(tmp_path)
    again = load(config, tmp_path)
    assert (again.fingerprint, again.vocab_size) == (tokenizer.fingerprint, tokenizer.vocab_size)
    np.testing.assert_array_equal(again.encode(prose(3)), tokenizer.encode(prose(3)))


def test_load_errors_name_the_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"tokenizer\.model: cannot read"):
        load(Bpe(), tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"no model")
    with pytest.raises(UserError, match=r"tokenizer\.model: not a SentencePiece model"):
        load(Bpe(), tmp_path)


def test_T01_a_lossy_model_is_refused(tmp_path: Path) -> None:
    import io

    import sentencepiece

    def model(**options: object) -> bytes:
        out = io.BytesIO()
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(prose(0).splitlines()), model_writer=out, vocab_size=290,
            eos_id=1, unk_id=0, bos_id=-1, minloglevel=2, **options,
        )  # fmt: skip
        return out.getvalue()

    with pytest.raises(UserError, match="lossy"):
        SentencePieceTokenizer(model(byte_fallback=True))
    with pytest.raises(UserError, match="no byte pieces"):
        SentencePieceTokenizer(model(hard_vocab_limit=False))


def test_a_text_without_spaces_still_keeps_them() -> None:
    text = "".join("abcdefg"[(i * i + i // 7) % 7] for i in range(5000))
    tokenizer, _ = train(Bpe(vocab_size=280), [text])
    assert tokenizer.decode_bytes(tokenizer.encode("a b  c")) == b"a b  c"


@pytest.mark.parametrize("config", [Bpe(vocab_size=290), Unigram(vocab_size=290)])
def test_T03_nothing_is_skipped(config: Bpe | Unigram) -> None:
    """The only q is in a 60 kB line; sentences with U+2585 or tabs are not lost either."""
    text = prose(1).replace("\n", " ") * 5 + "q" * 200 + " mat" * 10 + "\u2585" + "Z" * 200 + "\t" + "K" * 200
    tokenizer, report = train(config, [text, prose(2)])
    for letter in "qZK":
        assert tokenizer.encode(letter)[0] > 257, "seen in training: a piece of its own, no byte"
    assert report["skipped"] == 0
    assert report["bytes_used"] == report["bytes_given"] == len((text + prose(2)).encode()) - 3
    assert report["vocab_size"] == tokenizer.vocab_size == 290
    assert 1 < report["bytes_per_token"] < 20


@pytest.mark.parametrize("kind", [Bpe, Unigram])
def test_T04_a_vocabulary_the_text_cannot_fill(kind: type[Bpe] | type[Unigram]) -> None:
    with pytest.raises(UserError, match=r"vocab_size: 5000 is more than .* at most (\d+)$") as caught:
        train(kind(vocab_size=5000), [prose(0)])
    reachable = int(str(caught.value).split()[-1])
    assert train(kind(vocab_size=reachable), [prose(0)])[0].vocab_size == reachable


@pytest.mark.parametrize("kind", [Bpe, Unigram])
def test_T04_a_vocabulary_too_small_for_bytes_and_letters(kind: type[Bpe] | type[Unigram]) -> None:
    with pytest.raises(UserError, match=r"vocab_size: 100 is too small .* at least (\d+)$") as caught:
        train(kind(vocab_size=100), [prose(0)])
    smallest = int(str(caught.value).split()[-1])
    assert train(kind(vocab_size=smallest), [prose(0)])[0].vocab_size == smallest
    with pytest.raises(UserError, match=f"at least {smallest}$"):
        train(kind(vocab_size=smallest - 1), [prose(0)])


@pytest.mark.parametrize("texts", [[], [""], ["\n\n\n"], ["a"]])
def test_D16_no_text_to_train_on(texts: list[str]) -> None:
    with pytest.raises(UserError, match=r"tokenizer\.vocab_size: 2048"):
        train(Bpe(), texts)


def test_training_gives_the_same_model_again_and_newlines_join_pieces(
    unigram: SentencePieceTokenizer,
) -> None:
    assert train(Unigram(vocab_size=290), [prose(0)])[0].fingerprint == unigram.fingerprint
    assert any(b"\n" in unigram.token_bytes(i)[1:] for i in range(unigram.vocab_size))


def test_a_large_text_is_thinned_evenly(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [prose(i, 3000) for i in range(40)]
    size = sum(len(t) for t in texts)
    monkeypatch.setattr(tokenizer_training, "TRAINING_BYTES", size // 4)
    _, report = train(Bpe(vocab_size=290), texts, size)
    assert report["bytes_given"] == size and 0.2 < report["bytes_used"] / size < 0.3


def test_training_is_quiet(tmp_path: Path) -> None:
    code = (
        "from tests.data.conftest import prose; from transformer.data.tokenizer_training import train;"
        "from transformer.data.tokenizer import Unigram; train(Unigram(vocab_size=290), [prose(0)])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ})
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
