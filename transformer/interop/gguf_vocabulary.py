"""The vocabulary inside a GGUF file: as a SentencePiece model, or as the tokenizer.json of byte-level pieces."""

import json
from pathlib import Path
from typing import Any

from transformer.data.tokenizer import BLANK
from transformer.errors import UserError
from transformer.interop.vocabulary import Vocabulary, marks

CONTROL, USER_DEFINED, BYTE = 3, 4, 6  # kinds of pieces; SentencePiece has the same numbers

# How text is cut before its pieces are found, by tokenizer.ggml.pre.
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}


def _by(pattern: str) -> list[dict[str, Any]]:
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return [split, LEVEL | {"use_regex": False}]


CUTS: dict[str, list[dict[str, Any]]] = {
    "gpt-2": [LEVEL],
    "smollm": [{"type": "Digits", "individual_digits": True}, LEVEL],
    "llama-bpe": _by(LLAMA3),
    "qwen2": _by(QWEN2),
}


def find(path: Path, fields: dict[str, Any], config: dict[str, Any]) -> Vocabulary:
    """UserError for a kind of vocabulary that is not here."""

    def field(name: str, usual: Any = None) -> Any:
        return fields.get(f"tokenizer.ggml.{name}", usual)

    kind, tokens, kinds = field("model"), field("tokens"), field("token_type")
    starts, ends = marks(config, {})
    if not isinstance(tokens, list) or not isinstance(kinds, list) or len(tokens) != len(kinds):
        raise UserError(f"{path}: holds no vocabulary; name one with --tokenizer=PATH")
    if kind == "llama":
        scores = field("scores", [])
        if len(scores) != len(tokens):
            raise UserError(f"{path}: has {len(scores)} scores for {len(tokens)} pieces")
        data = sentencepiece_model(tokens, scores, kinds, bool(field("add_space_prefix", True)))
        return Vocabulary("sentencepiece", data, starts, ends)
    if kind == "gpt2" and field("pre", "gpt-2") in CUTS:
        settings = byte_level(tokens, kinds, field("merges", []), CUTS[field("pre", "gpt-2")])
        return Vocabulary("json", json.dumps(settings).encode(), starts, ends)
    raise UserError(
        f"{path}: tokenizer.ggml.model={kind!r} with pre={field('pre')!r} is not known (there are: llama, and gpt2 "
        f"with {', '.join(CUTS)}); name a tokenizer with --tokenizer=PATH"
    )


def sentencepiece_model(tokens: list[str], scores: list[float], kinds: list[int], prefix: bool) -> bytes:
    """The content of a SentencePiece model file: byte-pair pieces, text as it is but for a blank before it."""
    from sentencepiece import sentencepiece_model_pb2

    messages: Any = sentencepiece_model_pb2  # made when it is imported
    model = messages.ModelProto()
    for token, score, kind in zip(tokens, scores, kinds, strict=True):
        # Runs of blanks are there as blanks; the model that they came from had them as letters.
        model.pieces.add(piece=token.replace(" ", BLANK), score=score, type=kind)
    model.trainer_spec.model_type = 2  # BPE
    model.trainer_spec.byte_fallback = BYTE in kinds
    model.normalizer_spec.name = "identity"
    model.normalizer_spec.add_dummy_prefix = prefix
    model.normalizer_spec.remove_extra_whitespaces = False
    data: bytes = model.SerializeToString()
    return data


def byte_level(tokens: list[str], kinds: list[int], merges: list[str], cuts: list[dict[str, Any]]) -> dict[str, Any]:
    """A tokenizer.json."""
    marks = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {
        "version": "1.0",
        "added_tokens": [
            {"id": i, "content": token, **marks, "special": kind == CONTROL}
            for i, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
            if kind in (CONTROL, USER_DEFINED)
        ],
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": cuts},
        "decoder": LEVEL,
        "model": {"type": "BPE", "vocab": {token: i for i, token in enumerate(tokens)}, "merges": merges},
    }
