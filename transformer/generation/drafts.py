"""Where a draft for `speculate` comes from: another run, or the model's own first blocks."""

import dataclasses
from typing import Any, NamedTuple

import jax

from transformer.config import Experiment
from transformer.errors import UserError
from transformer.model import config as model_config
from transformer.run import Run


class Draft(NamedTuple):
    """A smaller model of the same vocabulary, and how many tokens it proposes at a time."""

    experiment: Experiment
    params: Any
    proposals: int


def check(proposals: int) -> None:
    """UserError for a number of proposals that is none."""
    if proposals < 1:
        raise UserError(f"--proposals: {proposals} is too small, set 1 or more")


def of_run(run: Run, draft: Run, proposals: int) -> Draft:
    """The newest weights of another run. UserError where its tokens are not the same."""
    check(proposals)
    if draft.tokenizer.fingerprint != run.tokenizer.fingerprint:
        raise UserError(
            f"--draft: {draft.directory} has another tokenizer than {run.directory}; take a run that was trained with "
            f"the same one"
        )
    return Draft(draft.experiment.program, draft.params()[0], proposals)


def first_blocks(experiment: Experiment, params: Any, count: int, proposals: int) -> Draft:
    """The first ``count`` blocks, gone through once, with the model's own final norm and unembedding."""
    check(proposals)
    model = experiment.model
    most = model.depth if model.loops > 1 else model.depth - 1
    if not 1 <= count <= most:
        possible = f"set 1 to {most}" if most else "a model of one block has no smaller one in it"
        raise UserError(f"--draft_blocks: {count} of {model.depth} blocks; {possible}")
    smaller = dataclasses.replace(model, depth=count, loops=1)
    try:
        model_config.check(smaller)
    except UserError as error:
        raise UserError(f"--draft_blocks: {count} blocks alone are no model: {error}") from error
    blocks = jax.tree.map(lambda w: w[:count], params["blocks"])
    return Draft(dataclasses.replace(experiment, model=smaller).program, {**params, "blocks": blocks}, proposals)
