"""The model card of an export, from what the run's directory knows of itself."""

from typing import Any

from transformer.analysis.cost import count_parameters
from transformer.run import Run


def card(run: Run, family: str, step: int, known: dict[str, Any], tokenizer: str) -> str:
    """Markdown: the model, its data and its training, with nothing that was not written down."""
    e, imported = run.experiment, known.get("imported")
    m, parameters = e.model, count_parameters(e)["total"]
    lines = [
        "---",
        "library_name: transformers",
        "---",
        "",
        f"# {run.directory.name}",
        "",
        f"A decoder-only Transformer of {parameters:,} parameters: {m.depth} blocks, width {m.width}, "
        f"{m.heads} heads, context {m.context}, {e.vocab_size:,} entries. Written as a checkpoint of {family}.",
        "",
        f"- tokenizer: {tokenizer}",
        f"- weights: float32, after step {step}",
    ]
    if imported:
        lines += [f"- imported from `{imported['from']}` ({imported['family']})"]
    if step or not imported:
        lines += [
            f"- text: `{e.data.source}` (content {known.get('content_hash', 'unknown')})",
            f"- training: {e.train.steps} steps of {e.train.batch} rows, learning rate {e.train.learning_rate}, "
            f"seed {e.train.seed}",
            f"- started from: {e.train.init_from or 'random weights'}",
        ]
    lines += [
        f"- code: commit {known.get('commit') or 'unknown'}"
        + (", with uncommitted changes" if known.get("uncommitted") else ""),
        f"- configuration: {e.name}",
        f"- made: {known.get('start', 'unknown')} to {known.get('end', 'unknown')}",
    ]
    return "\n".join(lines) + "\n"
