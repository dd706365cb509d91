"""Measure a run: its validation split, or a text of the user's, with the protocol in the result."""

from pathlib import Path
from typing import Any

from transformer import run as runs
from transformer.analysis.compressors import compressed
from transformer.analysis.evaluate import evaluate, total
from transformer.config import Experiment
from transformer.data.documents import Documents, Encoded, encode, token_sizes
from transformer.data.prepare import Log, prepare
from transformer.data.readers import find, read
from transformer.errors import UserError
from transformer.run import Run

EVALUATION = "evaluation.json"


def validation(run: Run, cache: Path, log: Log) -> Documents:
    """The documents that the run's training held out. UserError where the text has changed since."""
    prepared = prepare(run.experiment.data, run.experiment.tokenizer, cache, log)
    runs.check_text(run.directory, prepared.content_hash, prepared.tokenizer.fingerprint)
    return Documents(prepared.validation, run.tokenizer.start_id)


def texts(run: Run, source: str) -> Encoded:
    """The documents of a user's file, encoded as training text is."""
    piece_bytes = run.experiment.data.piece_bytes
    field = run.experiment.data.text_field  # of JSON lines and Parquet; a plain file has none
    found = [b"".join(d.chunks()) for file in find(source) for d in read(file, field)]
    if not any(found):
        raise UserError(f"{source}: holds no text")
    return Encoded([encode(run.tokenizer, text, piece_bytes) for text in found], sum(map(len, found)))


def measure(
    run: Run, params: Any, step: int, what: str, found: Documents | Encoded, stride: int | None, int8: bool = False
) -> dict[str, Any]:
    """Loss, perplexity, bits per byte and accuracy over all of ``found``, with compressors beside them.

    ``int8``: keys and values as an int8 cache gives them back, which is what its rounding costs.
    """
    experiment: Experiment = run.experiment
    context = experiment.model.context
    stride = max(1, context // 2) if stride is None else stride
    scores = evaluate(experiment, params, found, token_sizes(run.tokenizer), stride=stride, int8=int8)
    decoded = (run.tokenizer.decode_bytes(found[i][1:]) for i in range(len(found)))
    return {
        "run": str(run.directory),
        "step": step,
        "text": what,
        **total(scores)._replace(bytes=found.bytes).report(),  # an imported tokenizer may add and drop some
        "window": context,
        "stride": stride,
        "documents": len(found),
        **({"cache": "int8"} if int8 else {}),
        **compressed(decoded),
        "protocol": "each token scored once, from the start token and the window's tokens before it; "
        "the end of a document is not scored",
    }


def sentence(result: dict[str, Any]) -> str:
    """The result as a person reads it."""
    cut = result["compressed_bytes"]
    cut_text = f" on its first {cut / 2**20:.0f} MiB" if cut < result["bytes"] else ""
    return (
        f"{result['text']}: {result['bits_per_byte']:.4f} bits per byte (gzip -9: {result['gzip_bits_per_byte']:.2f}, "
        f"xz -9: {result['xz_bits_per_byte']:.2f}{cut_text}), loss {result['loss']:.4f} nats per token, "
        f"perplexity {result['perplexity']:.2f}, accuracy {result['accuracy']:.1%}\n"
        f"{result['tokens']:,} tokens, {result['bytes']:,} bytes, {result['documents']} documents, "
        f"window {result['window']}, stride {result['stride']}, step {result['step']}"
        + (", int8 cache" if "cache" in result else "")
    )
