"""A tokenizer that came with published weights, as it is: the ids that its own library gives.

Text gives no special token, whatever it says; what is folded or dropped by the original is here too, so such a
tokenizer need not be lossless, and bits per byte count the bytes of the source. Where there is no tokenizer, text is
ids: numbers with blanks between them.
"""

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from transformer.data.tokenizer import (
    BLANK,
    MODEL_FILE,
    Ids,
    Imported,
    check_ids,
    describe_bytes,
    sentencepiece_bytes,
    utf8,
)
from transformer.errors import UserError

JSON_FILE = "tokenizer.json"
FILES = {"json": JSON_FILE, "sentencepiece": MODEL_FILE, "ids": ""}


class ImportedTokenizer:
    """``data`` is the content of the format's file. UserError where it is none, or has ids that the model has not."""

    whole = True  # its first blank may be one that it adds: a document is not encoded in pieces

    def __init__(self, config: Imported, data: bytes):
        self.config, self.data = config, data
        self.vocab_size = config.vocab_size
        self.starts = () if config.start_id is None else (config.start_id,)
        self.end_ids = config.end_ids
        marks = f"{config.vocab_size} {config.start_id} {list(config.end_ids)}".encode()
        self.fingerprint = hashlib.sha256(hashlib.sha256(data).digest() + marks).hexdigest()
        check_ids([*self.starts, *self.end_ids], self.vocab_size)
        pieces: dict[int, bytes]
        if config.format == "json":
            self._encode, pieces = _json(data)
        elif config.format == "sentencepiece":
            self._encode, pieces = _sentencepiece(data)
        else:
            self._encode, pieces = self._numbers, {i: f"{i} ".encode() for i in range(self.vocab_size)}
        if max(pieces) >= self.vocab_size:
            raise UserError(f"the tokenizer has the id {max(pieces)}, the model knows {self.vocab_size}")
        self._bytes = [pieces.get(i, b"") for i in range(self.vocab_size)]

    @property
    def start_id(self) -> int:
        """What stands before a text. UserError where these weights have nothing that does."""
        return self._known("start_id", self.starts)

    @property
    def end_id(self) -> int:
        return self._known("end_ids", self.end_ids)

    @staticmethod
    def _known(name: str, ids: Sequence[int]) -> int:
        if not ids:
            raise UserError(f"config.tokenizer.{name}: the imported weights name none, and this needs one")
        return ids[0]

    def _numbers(self, texts: Sequence[str]) -> list[list[int]]:
        found = []
        for text in texts:
            words = text.split()
            if not all(word.isdecimal() and word.isascii() and len(word) < 10 for word in words):
                raise UserError(f"{text[:40]!r}: this run has no tokenizer, its text is ids with blanks between them")
            found.append([int(word) for word in words])
        return found

    def encode(self, text: str) -> Ids:
        """Ids of ``text``, never a special one. UserError for lone surrogates."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        for text in texts:
            utf8(text)
        return [check_ids(ids, self.vocab_size) for ids in self._encode(texts)]

    def token_bytes(self, token: int) -> bytes:
        """The bytes that an id stands for; b'' for a special one, and for one that the tokenizer does not have."""
        check_ids([token], self.vocab_size)
        return self._bytes[token]

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """What the ids stand for, in order; with the blank that the original may add before a text."""
        return b"".join(self._bytes[i] for i in check_ids(ids, self.vocab_size).tolist())

    def decode(self, ids: Iterable[int]) -> str:
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def describe(self, token: int) -> str:
        """What a person reads for one id."""
        found = self.token_bytes(token)
        return describe_bytes(found) if found else f"<{token}>"

    def save(self, directory: Path) -> None:
        if self.data:
            (directory / FILES[self.config.format]).write_bytes(self.data)


def load(config: Imported, directory: Path) -> ImportedTokenizer:
    """That of ``tokenizer.path`` or, where there is none, of the run in ``directory``."""
    path = (Path(config.path).expanduser() if config.path else directory) / FILES[config.format]
    try:
        return ImportedTokenizer(config, path.read_bytes() if config.format != "ids" else b"")
    except OSError as error:
        raise UserError(f"config.tokenizer.path: {path}: cannot be read: {error.strerror or error}") from None
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


def _sentencepiece(model: bytes) -> tuple[Any, dict[int, bytes]]:
    import sentencepiece

    try:
        pieces: Any = sentencepiece.SentencePieceProcessor(model_proto=model)
    except RuntimeError as error:
        raise UserError(f"not a SentencePiece model: {error}") from None

    def encode(texts: Sequence[str]) -> list[list[int]]:
        found: list[list[int]] = pieces.encode(list(texts), num_threads=-1 if len(texts) > 16 else 1)
        return found

    return encode, {i: sentencepiece_bytes(pieces, i) for i in range(pieces.vocab_size())}


def _json(data: bytes) -> tuple[Any, dict[int, bytes]]:
    try:
        import tokenizers
    except ImportError:
        raise UserError("a tokenizer.json needs the package tokenizers, which is not installed") from None
    try:
        tokenizer: Any = tokenizers.Tokenizer.from_buffer(data)
        settings = json.loads(data)
    except Exception as error:  # the library raises bare ones
        raise UserError(f"not a tokenizer.json: {error}") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True  # as the ordinary text that it is

    def encode(texts: Sequence[str]) -> list[list[int]]:
        return [found.ids for found in tokenizer.encode_batch(list(texts), add_special_tokens=False)]

    kinds = set(_types(settings.get("decoder")))
    if "ByteLevel" in kinds:
        letters = {letter: bytes([b]) for b, letter in byte_letters().items()}

        def spelled(piece: str) -> bytes:
            return b"".join(letters.get(letter, letter.encode()) for letter in piece)
    elif kinds & {"ByteFallback", "Metaspace"}:

        def spelled(piece: str) -> bytes:
            is_byte = len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">")
            return bytes([int(piece[3:5], 16)]) if is_byte else piece.replace(BLANK, " ").encode()
    else:
        raise UserError(f"its decoder ({', '.join(sorted(kinds)) or 'none'}) is not known: byte-level or with bytes")
    added = {i: b"" if t.special else t.content.encode() for i, t in tokenizer.get_added_tokens_decoder().items()}
    return encode, {i: spelled(piece) for piece, i in tokenizer.get_vocab(with_added_tokens=True).items()} | added


def _types(decoder: Any) -> list[str]:
    """The kinds of a decoder and of those in it."""
    if not isinstance(decoder, dict):
        return []
    inner = decoder.get("decoders")
    return [str(decoder.get("type")), *(kind for one in inner or [] for kind in _types(one))]


def byte_letters() -> dict[int, str]:
    """GPT-2's letter for every byte: itself where it can be seen, else the next ones from U+0100 on."""
    seen = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [b for b in range(256) if b not in seen]
    return {b: chr(b) for b in seen} | {b: chr(256 + n) for n, b in enumerate(rest)}
