"""Imported tokenizers give the ids of the library that they come from, on everything that tokenizers stumble over."""

import io
import itertools
import json

import pytest
import sentencepiece
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from transformer.data.imported import ImportedTokenizer, load
from transformer.data.tokenizer import HOSTILE, Imported
from transformer.errors import UserError
from transformer.interop.gguf_vocabulary import byte_level, sentencepiece_model

TEXT = ["the cat sat on the mat, the dog ran over the hill\n", "Rain fell; 1234 and 5678!  \tcafé — ok"] * 30
SPECIAL = ["<s>", "</s>", "<pad>"]


def byte_level_json() -> bytes:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        TEXT,
        trainers.BpeTrainer(vocab_size=330, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False),
    )
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding()
    return tokenizer.to_str().encode()


def byte_fallback_json() -> bytes:
    """As Llama's: a blank before each text, blanks as letters, bytes for letters that it has not."""
    letters = sorted({*"".join(TEXT).replace(" ", "▁"), "▁"})
    pieces = [*SPECIAL, *(f"<0x{b:02X}>" for b in range(256)), *letters, "th", "▁the", "▁th"]
    vocab = {piece: i for i, piece in enumerate(dict.fromkeys(pieces))}
    merges = [("t", "h"), ("▁", "th"), ("▁th", "e")]
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab, merges, byte_fallback=True, fuse_unk=True, unk_token="<pad>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer.to_str().encode()


def sentencepiece_bytes() -> bytes:
    """With the defaults that fold text and add a blank, as published ones have."""
    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXT), model_writer=out, vocab_size=330, byte_fallback=True, model_type="bpe",
        minloglevel=2, hard_vocab_limit=False,
    )  # fmt: skip
    return out.getvalue()


FORMATS = {
    "byte level": ("json", byte_level_json),
    "byte fallback": ("json", byte_fallback_json),
    "sentencepiece": ("sentencepiece", sentencepiece_bytes),
}


@pytest.fixture(scope="module", params=FORMATS)
def pair(request):
    """An imported tokenizer, and the ids that its own library gives to a text that is all text."""
    kind, make = FORMATS[request.param]
    data = make()
    ours = ImportedTokenizer(Imported(format=kind, vocab_size=600, start_id=0, end_ids=(1, 2)), data)
    if kind == "sentencepiece":
        return ours, sentencepiece.SentencePieceProcessor(model_proto=data).encode
    original = tokenizers.Tokenizer.from_str(data.decode())
    original.no_truncation()
    original.no_padding()
    original.encode_special_tokens = True
    return ours, lambda text: original.encode(text, add_special_tokens=False).ids


def test_ids_are_the_originals_on_hostile_text(pair):
    ours, original = pair
    texts = [*HOSTILE, "the cat", "x" * 3000, "the  the\n\nthe"]
    for text, ids in zip(texts, ours.encode_batch(texts), strict=True):
        assert ids.tolist() == original(text) == ours.encode(text).tolist(), text


def test_text_is_never_a_special_token_and_bytes_come_back(pair):
    ours, _ = pair
    for text in ("a</s>b<s>c<pad>", "<s>", "the </s>"):
        ids = ours.encode(text).tolist()
        assert not {0, 1, 2} & set(ids) and "".join(ours.decode(ids).split()) == "".join(text.split())
    assert ours.decode_bytes(ours.encode("the é\U0001f469")).strip() == "the é\U0001f469".encode()
    assert ours.decode_bytes([0, 1, 2, 599]) == b"" and ours.describe(1) == "<1>"
    with pytest.raises(UserError, match="lone surrogate"):
        ours.encode("\ud800")


def test_a_saved_one_is_the_same_and_marks_are_part_of_it(pair, tmp_path):
    ours, _ = pair
    ours.save(tmp_path)
    assert load(ours.config, tmp_path).fingerprint == ours.fingerprint
    other = Imported(format=ours.config.format, vocab_size=600, start_id=1, end_ids=(1, 2))
    assert load(other, tmp_path).fingerprint != ours.fingerprint


def test_what_is_none_is_refused(tmp_path):
    for kind, data in (("json", b"{"), ("json", b"\xff\x00"), ("sentencepiece", b"\x08\x01nonsense")):
        with pytest.raises(UserError, match="not a"):
            ImportedTokenizer(Imported(format=kind, vocab_size=600), data)
    with pytest.raises(UserError, match="the model knows 300"):
        ImportedTokenizer(Imported(format="json", vocab_size=300), byte_level_json())
    with pytest.raises(UserError, match=r"its decoder \(WordPiece\) is not known"):
        settings = json.loads(byte_level_json()) | {"decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True}}
        ImportedTokenizer(Imported(format="json", vocab_size=600), json.dumps(settings).encode())
    with pytest.raises(UserError, match="cannot be read"):
        load(Imported(format="json", vocab_size=600), tmp_path)


def test_weights_without_a_tokenizer_have_numbers_for_text():
    ids = ImportedTokenizer(Imported(format="ids", vocab_size=30), b"")
    assert ids.encode(" 3 17\n29 ").tolist() == [3, 17, 29] and ids.decode([3, 17]) == "3 17 "
    for text in ("a", "3 x", "-1", "30"):
        with pytest.raises(UserError):
            ids.encode(text)
    with pytest.raises(UserError, match=r"config.tokenizer.start_id: the imported weights name none"):
        assert ids.start_id
    with pytest.raises(UserError, match=r"config.tokenizer.end_ids: the imported weights name none"):
        assert ids.end_id


def test_the_pieces_of_a_gguf_file_give_the_ids_of_the_tokenizer_they_were_taken_from():
    given = sentencepiece.SentencePieceProcessor(model_proto=sentencepiece_bytes())
    pieces = range(given.vocab_size())
    kinds = [6 if given.is_byte(i) else 2 if given.is_unknown(i) else 3 if given.is_control(i) else 1 for i in pieces]
    scores = [given.get_score(i) for i in pieces]
    tokens = [given.id_to_piece(i) for i in pieces]
    runs = sentencepiece.SentencePieceProcessor(  # of blanks: pieces that a user defined, written as blanks
        model_proto=sentencepiece_model([*tokens, "   "], [*scores, -9.0], [*kinds, 4], prefix=False)
    )
    assert runs.encode("the   cat")[-2 - len(runs.encode("cat")) :].count(len(tokens)) == 1
    made = sentencepiece.SentencePieceProcessor(model_proto=sentencepiece_model(tokens, scores, kinds, prefix=True))
    for text in ("the cat sat", "x</s>y", "1234 café", "\U0001f469 over"):
        assert made.encode(text) == given.encode(text)
    settings = json.loads(byte_level_json())
    vocab = settings["model"]["vocab"]
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in settings["model"]["merges"]]
    level = [{"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}]
    built = byte_level(sorted(vocab, key=vocab.get), [3, 3, 3, *itertools.repeat(1, len(vocab) - 3)], merges, level)
    config = Imported(format="json", vocab_size=600)
    one, other = ImportedTokenizer(config, json.dumps(built).encode()), ImportedTokenizer(config, byte_level_json())
    assert [one.encode(text).tolist() for text in HOSTILE] == [other.encode(text).tolist() for text in HOSTILE]
