"""Train a SentencePiece model on the training split: deterministic, quiet, nothing skipped in silence."""

import io
import re
from collections.abc import Iterable, Iterator
from typing import Any

from transformer.data.permutation import mix
from transformer.data.tokenizer import BLANK, HOSTILE, Bpe, SentencePieceTokenizer, Unigram
from transformer.errors import UserError

# Chunks keep their newlines, so that pieces such as ",\n" can form: 9% more bytes per token on plays
# than with one sentence per line. Cut near this many characters, always below SentencePiece's limit.
CHUNK = 1000
LONGEST = 8 * CHUNK  # bytes: a chunk has at most 2 * CHUNK characters of at most 4 bytes
# SentencePiece skips a sentence that holds U+2585 (it marks unknowns with it), and reads U+2581 as a
# space. Neither may enter a piece, so chunks are cut there; encoding gives both as bytes.
_UNKNOWN = "\u2585"
_RESERVED = re.compile(f"[{_UNKNOWN}{BLANK}]+")
# More text than this is thinned out. Measured with 8192 entries on two busy cores: unigram needs 68 s and
# 1.1 GB for 50 MB, 505 s and 2.2 GB for 100 MB; BPE 29 s and 0.9 GB for 100 MB.
TRAINING_BYTES = 50_000_000
# Sums in the trainer are split by thread: a fixed number gives the same model on any machine.
THREADS = 4


def train(
    config: Unigram | Bpe, texts: Iterable[str], size: int | None = None
) -> tuple[SentencePieceTokenizer, dict[str, Any]]:
    """Train on ``texts`` (pieces of any length); ``size`` is their total in bytes where it is known.

    With ``size`` above TRAINING_BYTES a sample of chunks (the same each time) is used; without it, all.
    Gives the tokenizer and a report: kind, vocab_size, bytes_per_token (on some of the text used), chunks,
    bytes_used, bytes_given (after the reserved letters are cut out), round_trips (hostile texts that came
    back exactly), fingerprint. Raises UserError when the text cannot fill the vocabulary, or the
    vocabulary cannot hold the characters, with the size that is possible.
    """
    import sentencepiece

    kind = "unigram" if isinstance(config, Unigram) else "bpe"
    feed = _Feed(texts, min(1.0, TRAINING_BYTES / size) if size else 1.0)
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(feed),
            model_writer=model,
            model_type=kind,
            vocab_size=config.vocab_size,
            # Lossless: no folding, no dropped or added blanks, bytes for what is rare.
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=False,
            byte_fallback=True,
            required_chars=BLANK,  # without it a text without spaces trains a model that decodes " " wrongly
            allow_whitespace_only_pieces=True,  # indentation: 1.94 -> 3.13 bytes per token on Python code
            unk_id=0,
            eos_id=1,
            bos_id=-1,
            pad_id=-1,
            max_sentence_length=LONGEST,
            num_threads=THREADS,
            minloglevel=2,
        )
    except RuntimeError as error:
        raise _explain(error, config.vocab_size, kind, feed.used) from None
    assert not feed.skipped, "chunks that the trainer leaves out"
    tokenizer = SentencePieceTokenizer(model.getvalue())  # also checks the round trip of HOSTILE
    if tokenizer.vocab_size != config.vocab_size:
        raise UserError(f"tokenizer.vocab_size: asked for {config.vocab_size}, got {tokenizer.vocab_size}")
    report = {
        "kind": kind,
        "vocab_size": tokenizer.vocab_size,
        "bytes_per_token": feed.bytes_per_token(tokenizer),
        "chunks": feed.chunks,
        "bytes_used": feed.used,
        "bytes_given": feed.given,
        "skipped": feed.skipped,
        "round_trips": len(HOSTILE),
        "fingerprint": tokenizer.fingerprint,
    }
    return tokenizer, report


class _Feed:
    """Cuts texts into chunks for the trainer, thins them evenly, and counts."""

    def __init__(self, texts: Iterable[str], share: float):
        self.texts, self.share = texts, share
        self.chunks = self.used = self.given = self.skipped = 0
        self._sample: list[str] = []

    def __iter__(self) -> Iterator[str]:
        seen = 0
        for text in self.texts:
            for chunk in _chunks(text):
                size = len(chunk.encode())
                self.given += size
                seen += 1
                # By a hash of the count: every k-th would fall in step with how texts are cut.
                if mix(seen) >= self.share * 2.0**64:
                    continue
                self.chunks += 1
                self.used += size
                self.skipped += size > LONGEST or _UNKNOWN in chunk
                if self.chunks % 10 == 1:
                    self._sample.append(chunk)
                yield chunk

    def bytes_per_token(self, tokenizer: SentencePieceTokenizer) -> float:
        """Measured on one chunk in ten."""
        tokens = sum(map(len, tokenizer.encode_batch(self._sample)))
        return sum(len(s.encode()) for s in self._sample) / max(tokens, 1)


def _chunks(text: str) -> Iterator[str]:
    """``text`` in chunks of about CHUNK characters that end after a newline, else after a space."""
    for part in _RESERVED.split(text):
        start = 0
        while start < len(part):
            stop = min(start + CHUNK, len(part))
            if stop < len(part):
                for mark in "\n ":
                    found = part.find(mark, stop, stop + CHUNK)
                    if found >= 0:
                        stop = found + 1
                        break
            yield part[start:stop]
            start = stop


def _explain(error: RuntimeError, vocab_size: int, kind: str, used: int) -> UserError:
    message = str(error)
    where = f"tokenizer.vocab_size: {vocab_size}"
    if found := re.search(r"value <= (\d+)", message):
        return UserError(f"{where} is more than {used} bytes of text can fill with a {kind} model: at most {found[1]}")
    if found := re.search(r"required_chars\. \d+ vs (\d+)", message):
        return UserError(
            f"{where} is too small for the 256 bytes, end of text and the text's own characters: at least {found[1]}"
        )
    return UserError(f"{where}: cannot train a {kind} model on {used} bytes of text: {message.splitlines()[0]}")
