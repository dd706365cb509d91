"""What a model is measured on while it trains and at the end: a text's validation split, or a task's held-out rows."""

import functools
from collections.abc import Callable
from typing import Any

from transformer.analysis.answers import answer
from transformer.analysis.evaluate import evaluate, total
from transformer.config import Experiment
from transformer.data.documents import Documents, token_sizes
from transformer.data.prepare import Prepared
from transformer.data.tasks.task import Task


def validator(experiment: Experiment, prepared: Prepared) -> Callable[..., dict[str, Any]]:
    """A function of parameters, ``rows``, ``count`` and ``pause`` (as in `evaluate.evaluate`) to a report.

    Of text: loss, perplexity, accuracy and bits per byte. Of a task: error in place of the last, by difficulty too.
    """
    if isinstance(experiment.data.source, Task):

        def of_task(params: Any, **how: Any) -> dict[str, Any]:
            return answer(experiment, params, **how).report()

        return of_task
    documents, sizes = Documents(prepared.validation, prepared.tokenizer.start_id), token_sizes(prepared.tokenizer)
    stride = max(1, experiment.model.context // 2)

    @functools.cache
    def source_share(i: int) -> float:
        """Bytes of document ``i``'s source for each that its tokens stand for: 1, where the tokenizer is lossless."""
        return documents.sources[i] / int(sizes[documents[i][1:]].sum())

    def of_text(params: Any, **how: Any) -> dict[str, Any]:
        scores = evaluate(experiment, params, documents, sizes, stride=stride, **how)
        size = sum(score.bytes * source_share(i) for i, score in enumerate(scores) if score.bytes)
        return total(scores)._replace(bytes=round(size)).report()

    return of_text


def as_record(report: dict[str, Any]) -> dict[str, Any]:
    """A report as a line of metrics.jsonl has it."""
    found = {"eval_loss": report["loss"], "perplexity": report["perplexity"], "accuracy": report["accuracy"]}
    if "bits_per_byte" in report:
        sizes = {"eval_tokens": report["tokens"], "eval_bytes": report["bytes"]}
        return found | {"bits_per_byte": report["bits_per_byte"]} | sizes
    each = {f"error/{report['difficulty']}={row['value']}": row["error"] for row in report["by_difficulty"]}
    return found | {"error": report["error"], "eval_answers": report["answers"]} | each


def in_words(report: dict[str, Any]) -> str:
    """A report in half a line."""
    start = f"validation loss {report['loss']:.4f}, perplexity {report['perplexity']:.2f}, "
    if "bits_per_byte" in report:
        return start + f"{report['bits_per_byte']:.4f} bits per byte"
    return start + f"error {report['error']:.4f} (by chance {report['chance_error']:.4f})"
