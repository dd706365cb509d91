"""Text to ids and back, without loss: whatever text goes in, the same bytes come out.

Three kinds: plain UTF-8 bytes (257 ids), SentencePiece models (unigram or BPE) trained by
``tokenizer_training``, and the symbols of a synthetic task, which are no text. The first two have one special id,
*end of text*. It is never produced from text: it is placed before every piece of text as its start and after a
whole document as its end, in one place only (``prepare``). Text that looks like a special token, such as ``</s>``,
is ordinary text.
"""

import hashlib
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Union

import numpy as np
import numpy.typing as npt

from transformer.errors import UserError, did_you_mean
from transformer.settings import settings

if TYPE_CHECKING:
    from transformer.data.imported import ImportedTokenizer

Ids = npt.NDArray[np.int32]

MODEL_FILE = "tokenizer.model"
SYMBOLS_FILE = "tokenizer.symbols"
# SentencePiece writes a space as this letter inside its pieces, so the letter itself needs care.
BLANK = "\u2581"
_BYTE_PIECE = re.compile(r"<0x([0-9A-F]{2})>")
# Everything that tokenizers are known to fold, drop, or take for something else.
HOSTILE = (
    "",
    " ",
    "  a  b  ",
    "\n\n a\r\nb\tc \n",
    "\x00nul\x00",
    "x</s>y<s>z<unk><pad><0x0A>",
    f"{BLANK}a{BLANK}{BLANK} b {BLANK}",
    "\ufb01x \u00bd caf\u00e9 cafe\u0301 \ufffd \u2047 \u2585 \ufeff",
    "\U0001f469\u200d\U0001f680 \U0001f1eb\U0001f1f7 \u05d0\u0300\u202e \U0010ffff",
    "foo " + " " * 300 + "\n" * 40 + " bar   ",
    "".join(map(chr, range(256))),
)


@settings
class Bytes:
    """One id per UTF-8 byte: 256, and one for end of text."""


@settings
class Unigram:
    """SentencePiece's unigram model, trained on the training split."""

    vocab_size: int = 2048


@settings
class Bpe:
    """Byte-pair encoding, trained on the training split."""

    vocab_size: int = 2048


@settings
class Imported:
    """The tokenizer of imported weights, as it is; ``ids``: they had none, and text is numbers."""

    path: str = ""  # a run that has it; empty: the run itself
    format: Literal["json", "sentencepiece", "ids"] = "json"
    vocab_size: int = 2  # of the model, which may have more rows than the tokenizer has entries
    start_id: int | None = None  # what stands before a text
    end_ids: tuple[int, ...] = ()  # what ends one


@settings
class Symbols:
    """A synthetic task's own vocabulary."""


TokenizerConfig = Bytes | Unigram | Bpe | Imported | Symbols


class ByteTokenizer:
    """The bytes of UTF-8 as ids 0..255; 256 is end of text."""

    vocab_size = 257
    start_id = end_id = 256
    starts, end_ids = (256,), (256,)
    whole = False
    fingerprint = hashlib.sha256(b"utf-8 bytes, 256 is end of text").hexdigest()

    def encode(self, text: str) -> Ids:
        """Ids of ``text``. Raises UserError for text that is no Unicode (lone surrogates)."""
        return np.frombuffer(utf8(text), np.uint8).astype(np.int32)

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        return [self.encode(text) for text in texts]

    def token_bytes(self, token: int) -> bytes:
        """The bytes that an id stands for; b'' for end of text."""
        check_ids([token], self.vocab_size)
        return bytes([token]) if token < 256 else b""

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """The exact bytes; end of text gives none. Raises UserError for ids outside the vocabulary."""
        array_T = check_ids(ids, self.vocab_size)
        return array_T[array_T < 256].astype(np.uint8).tobytes()

    def decode(self, ids: Iterable[int]) -> str:
        """Text; bytes that are no UTF-8 (a token sequence may end inside a letter) show as U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def describe(self, token: int) -> str:
        """What a person reads for one id, e.g. ``' '`` or ``<0xE2>`` or ``<end of text>``."""
        return describe_bytes(self.token_bytes(token))

    def save(self, directory: Path) -> None:
        """Nothing to save: the scheme is fixed."""


class SentencePieceTokenizer:
    """A SentencePiece model, checked on construction to be lossless.

    ``model`` is the content of a model file. Raises UserError when it is none, or when it changes text
    (folds blanks or letters, adds a leading blank) or has no byte pieces to fall back on.
    """

    whole = False  # a document may be encoded in pieces

    def __init__(self, model: bytes):
        import sentencepiece

        self.model = model
        self.fingerprint = hashlib.sha256(model).hexdigest()
        try:
            self._pieces: Any = sentencepiece.SentencePieceProcessor(model_proto=model)
        except RuntimeError as error:
            raise UserError(f"not a SentencePiece model: {error}") from None
        self.vocab_size: int = self._pieces.vocab_size()
        self.end_id: int = self._pieces.eos_id()
        if self.end_id < 0:
            raise UserError("the tokenizer model has no end of text (its eos_id is off)")
        self.start_id, self.starts, self.end_ids = self.end_id, (self.end_id,), (self.end_id,)
        self._bytes = [sentencepiece_bytes(self._pieces, i) for i in range(self.vocab_size)]
        self._byte_ids = {self._bytes[i]: i for i in range(self.vocab_size) if self._pieces.is_byte(i)}
        if len(self._byte_ids) < 256:
            raise UserError("the tokenizer model has no byte pieces, so it cannot hold every text")
        self._blank_ids = np.array([self._byte_ids[bytes([b])] for b in BLANK.encode()], np.int32)
        for text in HOSTILE:
            if self.decode_bytes(self.encode(text)) != text.encode():
                raise UserError(f"the tokenizer model is lossy: it changes {text[:40]!r}")

    def encode(self, text: str) -> Ids:
        """Ids of ``text``; never a special id. Raises UserError for lone surrogates."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """``encode`` of every text, on several threads."""
        for text in texts:
            utf8(text)
        # A literal BLANK would come back as a space: cut the text around it and put in its bytes.
        parts = [text.split(BLANK) for text in texts]
        flat = [part for split in parts for part in split]
        # Starting threads costs more than encoding a few texts: -1 is one per core.
        encoded = iter(self._pieces.encode(flat, num_threads=-1 if len(flat) > 16 else 1))
        out = []
        for split in parts:
            ids_T = np.array(next(encoded), np.int32)
            if len(split) > 1:
                rest = [x for _ in split[1:] for x in (self._blank_ids, np.array(next(encoded), np.int32))]
                ids_T = np.concatenate([ids_T, *rest])
            out.append(ids_T)
        return out

    def token_bytes(self, token: int) -> bytes:
        """The bytes that an id stands for; b'' for a special one."""
        check_ids([token], self.vocab_size)
        return self._bytes[token]

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """The exact bytes; special ids give none. Raises UserError for ids outside the vocabulary."""
        # Through our own table: SentencePiece's decoder hides bytes that are no UTF-8.
        return b"".join([self._bytes[i] for i in check_ids(ids, self.vocab_size).tolist()])

    def decode(self, ids: Iterable[int]) -> str:
        """Text; bytes that are no UTF-8 (a token sequence may end inside a letter) show as U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def describe(self, token: int) -> str:
        """What a person reads for one id, e.g. ``' the'`` or ``<0xE2>`` or ``<end of text>``."""
        if token != self.end_id and not self.token_bytes(token):
            return str(self._pieces.id_to_piece(token))
        return describe_bytes(self.token_bytes(token))

    def save(self, directory: Path) -> None:
        """Write ``tokenizer.model`` into ``directory``, which must exist."""
        (directory / MODEL_FILE).write_bytes(self.model)


def sentencepiece_bytes(pieces: Any, token: int) -> bytes:
    """The bytes that a piece of a SentencePiece processor stands for; b'' for a special one."""
    if pieces.is_control(token) or pieces.is_unknown(token):
        return b""
    piece: str = pieces.id_to_piece(token)
    if pieces.is_byte(token):
        match = _BYTE_PIECE.fullmatch(piece)
        assert match, piece
        return bytes([int(match[1], 16)])
    return piece.replace(BLANK, " ").encode()


class SymbolTokenizer:
    """The symbols of a synthetic task, which people read and write with spaces between them."""

    start_id = end_id = -1  # no row has a start or an end of text
    starts: tuple[int, ...] = ()
    end_ids: tuple[int, ...] = ()
    whole = False

    def __init__(self, symbols: Sequence[str]):
        self.symbols = tuple(symbols)
        self._ids = {symbol: i for i, symbol in enumerate(self.symbols)}
        self.vocab_size = len(self.symbols)
        self.fingerprint = hashlib.sha256("\n".join(self.symbols).encode()).hexdigest()

    def encode(self, text: str) -> Ids:
        """Ids of symbols with spaces between them. UserError for one that the task does not have."""
        unknown = next((word for word in text.split() if word not in self._ids), None)
        if unknown is not None:
            raise UserError(f"{unknown!r} is not a symbol of the task{did_you_mean(unknown, self._ids)}")
        return np.array([self._ids[word] for word in text.split()], np.int32)

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        return [self.encode(text) for text in texts]

    def token_bytes(self, token: int) -> bytes:
        """The symbol's name."""
        check_ids([token], self.vocab_size)
        return self.symbols[token].encode()

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        return self.decode(ids).encode()

    def decode(self, ids: Iterable[int]) -> str:
        """The symbols with spaces between them. UserError for ids outside the vocabulary."""
        return " ".join(self.symbols[i] for i in check_ids(ids, self.vocab_size).tolist())

    def describe(self, token: int) -> str:
        return self.token_bytes(token).decode()

    def save(self, directory: Path) -> None:
        """Write ``tokenizer.symbols``, a symbol a line, into ``directory``."""
        (directory / SYMBOLS_FILE).write_text("\n".join(self.symbols) + "\n", encoding="utf-8")


Tokenizer = Union[ByteTokenizer, SentencePieceTokenizer, SymbolTokenizer, "ImportedTokenizer"]


def load(config: TokenizerConfig, directory: Path) -> Tokenizer:
    """The tokenizer that ``save`` left in ``directory``. Raises UserError where there is none."""
    if isinstance(config, Bytes):
        return ByteTokenizer()
    if isinstance(config, Imported):
        from transformer.data import imported

        return imported.load(config, directory)
    if isinstance(config, Symbols):
        return _load_symbols(directory / SYMBOLS_FILE)
    path = directory / MODEL_FILE
    try:
        model = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: cannot read the tokenizer: {error.strerror or error}") from None
    try:
        return SentencePieceTokenizer(model)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


def _load_symbols(path: Path) -> SymbolTokenizer:
    try:
        return SymbolTokenizer(path.read_text(encoding="utf-8").splitlines())
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot read the task's symbols: {error}") from None


def utf8(text: str) -> bytes:
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UserError(
            f"text is no valid Unicode: a lone surrogate U+{ord(text[error.start]):04X} at character {error.start}"
        ) from None


def check_ids(ids: Iterable[int], vocab_size: int) -> Ids:
    array_T = np.asarray(ids if isinstance(ids, np.ndarray) else list(ids), np.int64).reshape(-1)
    wrong = array_T[(array_T < 0) | (array_T >= vocab_size)]
    if wrong.size:
        raise UserError(f"token id {wrong[0]} is outside the vocabulary of {vocab_size}")
    return array_T.astype(np.int32)


def describe_bytes(content: bytes) -> str:
    if not content:
        return "<end of text>"
    try:
        return repr(content.decode("utf-8"))
    except UnicodeDecodeError:
        return "".join(f"<0x{b:02X}>" for b in content)
