"""Measure a run: its validation split, or a text of the user's, with the protocol in the result."""

from pathlib import Path
from typing import Any

from transformer import run as runs
from transformer.analysis.answers import answer
from transformer.analysis.answers import sentence as answers_in_words
from transformer.analysis.compressors import compressed
from transformer.analysis.evaluate import evaluate, total
from transformer.config import Experiment
from transformer.data.documents import Documents, Encoded, encode, token_sizes
from transformer.data.prepare import Log, prepare
from transformer.data.readers import find, read
from transformer.data.tasks.task import Task
from transformer.errors import UserError
from transformer.files import read_provenance
from transformer.run import Run
from transformer.settings import tag_of

EVALUATION = "evaluation.json"


def validation(run: Run, cache: Path, log: Log) -> Documents:
    """The documents that the run's training held out. UserError where the text has changed since, or there was none."""
    if "imported" in read_provenance(run.directory):
        raise UserError(f"--text: {run.directory} is imported, and no text was held out of its training; give one")
    prepared = prepare(run.experiment.data, run.experiment.tokenizer, cache, log)
    runs.check_text(run.directory, prepared.content_hash, prepared.tokenizer.fingerprint)
    return Documents(prepared.validation, run.tokenizer.start_id)


def texts(run: Run, source: str) -> Encoded:
    """The documents of a user's file, encoded as training text is."""
    run.of_text("--text")
    piece_bytes = run.experiment.data.piece_bytes
    field = run.experiment.data.text_field  # of JSON lines and Parquet; a plain file has none
    found = [b"".join(d.chunks()) for file in find(source) for d in read(file, field)]
    if not any(found):
        raise UserError(f"{source}: holds no text")
    return Encoded([encode(run.tokenizer, text, piece_bytes) for text in found], sum(map(len, found)))


def measure_held_out(
    run: Run, params: Any, step: int, cache: Path, log: Log, stride: int | None, int8: bool = False
) -> dict[str, Any]:
    """What the run's training held out: `measure` of a text's validation split, or a task's rows answered."""
    task = run.experiment.data.source
    if not isinstance(task, Task):
        return measure(run, params, step, "validation split", validation(run, cache, log), stride, int8)
    if stride is not None:
        raise UserError(f"--stride: {tag_of(type(task))} has rows that are each read whole; leave it out")
    if int8:
        raise UserError(f"--int8_cache: {tag_of(type(task))} has rows that are read without a cache; leave it out")
    runs.check_text(run.directory, task.content_hash, run.tokenizer.fingerprint)
    return {
        "run": str(run.directory),
        "step": step,
        "text": f"{task.validation:,} held-out rows of {tag_of(type(task))}",
        **answer(run.experiment, params).report(),
        "protocol": "every answer of every held-out row once; of equally likely symbols each is right in part",
    }


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
    if "by_difficulty" in result:
        return answers_in_words(result)
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
