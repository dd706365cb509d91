"""Text in, text out: prompts to ids, ids to whole characters as they come."""

import codecs
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from transformer.errors import UserError
from transformer.generation.decode import Continuation, continue_prompts
from transformer.generation.drafts import Draft
from transformer.generation.prefill import PIECE, Generator
from transformer.generation.sampling import Sampling, check
from transformer.jsons import write_json
from transformer.model.attention import endless
from transformer.run import Run

SAMPLES = "samples.json"
CHUNK = 8  # tokens between two looks at a text that is being streamed
MOST = 256  # new tokens where none were asked for, if the context has room


class Sample(NamedTuple):
    """A prompt, what the model added (as text and as ids), and whether it ended there by itself; with a draft, how many
    tokens that proposed and how many of these were accepted."""

    prompt: str
    text: str
    ids: list[int]
    ended: bool
    proposed: int = 0
    accepted: int = 0


def encode_prompts(run: Run, prompts: Sequence[str]) -> list[list[int]]:
    """Ids of each prompt behind the start token. UserError where there is nothing to begin with."""
    found = [run.begin(prompt) for prompt in prompts]
    if not all(found):
        raise UserError("--prompt: is empty, and these weights have no token that starts a text; give one")
    return found


def room(run: Run, prompts: Sequence[Sequence[int]]) -> int:
    """How many tokens to add where nothing was asked for: what fits, up to MOST."""
    if endless(run.experiment.model):
        return MOST
    left = run.experiment.model.context - max(map(len, prompts))
    if left < 1:
        longest = max(map(len, prompts))
        raise UserError(
            f"--prompt: {longest} tokens (with the start) leave no room in the context of "
            f"{run.experiment.model.context}; shorten it"
        )
    return min(MOST, left)


def sample(
    run: Run,
    params: Any,
    prompts: Sequence[str],
    sampling: Sampling,
    *,
    new: int | None = None,
    seed: int = 0,
    use_cache: bool = True,
    piece: int = PIECE,
    int8: bool = False,
    draft: Draft | None = None,
    chunk: int | None = None,
) -> Iterator[list[Sample]]:
    """Continue every prompt; yields all texts so far: none at first, then every ``chunk`` steps and at the end."""
    check(sampling)
    if new is not None and new < 1:
        raise UserError(f"--tokens: {new} is too small, set 1 or more")
    if not 0 <= seed < 1 << 32:
        raise UserError(f"--seed: {seed} is not between 0 and {(1 << 32) - 1}")
    if piece < 1:
        raise UserError(f"--piece: {piece} is too small, set 1 or more")
    ids = encode_prompts(run, prompts)
    generator = Generator(run.experiment.program, sampling, run.tokenizer.end_ids, use_cache, piece, int8)
    if draft is not None:
        generator = dataclasses.replace(generator, draft=draft.experiment, proposals=draft.proposals)
    draft_params = draft and draft.params
    for found in continue_prompts(generator, params, ids, new or room(run, ids), seed, chunk, draft_params):
        yield [_sample(run, prompt, one) for prompt, one in zip(prompts, found, strict=True)]


def write_samples(run: Run, params: Any, step: int) -> list[Sample]:
    """Continue the experiment's ``train.prompts`` with the weights of ``step``, and keep that beside the run."""
    prompts = run.experiment.train.prompts
    *_, samples = sample(run, params, prompts, Sampling()) if prompts else ([],)
    write_json(run.directory / SAMPLES, [{"prompt": s.prompt, "text": s.text, "step": step} for s in samples])
    return samples


def _sample(run: Run, prompt: str, found: Continuation) -> Sample:
    return Sample(prompt, run.tokenizer.decode(found.ids), *found)


class Stream:
    """Turns growing ids into text piece by piece; a character is given out when all of its bytes are there."""

    def __init__(self, run: Run):
        self._tokenizer = run.tokenizer
        self._given = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def more(self, ids: Sequence[int], final: bool = False) -> str:
        fresh = self._tokenizer.decode_bytes(ids[self._given :])
        self._given = len(ids)
        return self._decoder.decode(fresh, final)
