"""What a harness asks of a model: how likely a continuation or a text is, and what the model itself goes on with.

A text begins with the tokenizer's start token, as in `evaluate`. What is longer than the context loses its beginning,
start token and all. Rows are padded to powers of two, so few programs are compiled.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from transformer.analysis.evaluate import TOKENS_AT_ONCE, Window, score_windows
from transformer.data.documents import Encoded, encode
from transformer.data.tokenizer import utf8
from transformer.errors import UserError
from transformer.generation.decode import continue_prompts, round_up
from transformer.generation.prefill import Generator
from transformer.generation.sampling import Sampling
from transformer.generation.sampling import check as check_sampling
from transformer.run import Run

CHUNK = 16  # tokens between two looks for a text that ends a continuation


class Likelihood(NamedTuple):
    """Of some tokens of a text: the natural log of their probability, and whether greedy choice gives them."""

    log_probability: float
    greedy: bool


@dataclasses.dataclass
class Requests:
    """A run's weights and what answers for them. ``shortened`` counts the requests that lost their beginning."""

    run: Run
    params: Any
    int8: bool = False
    pause: Callable[[], None] = lambda: None
    shortened: int = 0

    @property
    def context(self) -> int:
        return self.run.experiment.model.context

    def continuations(self, pairs: Sequence[tuple[str, str]]) -> list[Likelihood]:
        """How likely each continuation is behind its context. UserError for an empty one, for one that is longer than
        the model's context, and for one with nothing before it."""
        documents: list[np.ndarray] = []
        windows: list[Window] = []
        for i, (context, continuation) in enumerate(pairs):
            ids, scored = self.encode_pair(context, continuation)
            length = min(len(ids) - 1, self.context)
            if scored > length:
                raise UserError(
                    f"--tasks: a continuation of {scored} tokens has {len(ids) - scored} before it, and the context is "
                    f"{self.context}: {continuation[:40]!r} needs one before it and room for all of its own"
                )
            self.shortened += len(ids) - 1 > length
            documents.append(np.array(ids, np.int32))
            windows.append(Window(i, len(ids) - 1 - length, length, scored))
        return self._scores(documents, windows)

    def encode_pair(self, context: str, continuation: str) -> tuple[list[int], int]:
        """The ids of both together, and how many at the end are the continuation's.

        The whole is encoded at once: where a token spans the border, it counts for the continuation only if that
        would have none. Blanks at the end of the context go over to the continuation.
        """
        if not continuation:
            raise UserError(f"--tasks: the continuation of {context[-40:]!r} is empty; nothing is to be scored")
        kept = context.rstrip()
        whole = self.run.begin(context + continuation)
        return whole, max(len(whole) - len(self.run.begin(kept)), 1)

    def texts(self, texts: Sequence[str]) -> list[float]:
        """The log-probability of each text, every token once: in windows of the whole context, without overlap but for
        the last, which reaches back as far as it can. The first begins with the start token, UserError without one."""
        piece_bytes = self.run.experiment.data.piece_bytes
        documents = [encode(self.run.tokenizer, utf8(text), piece_bytes) for text in texts]
        windows = []
        for i, ids in enumerate(documents):
            count = len(ids) - 1
            for done in range(0, count, self.context):
                end = min(done + self.context, count)
                first = max(end - self.context, 0)
                windows.append(Window(i, first, end - first, end - done))
        totals = [0.0] * len(texts)
        for window, found in zip(windows, self._scores(documents, windows), strict=True):
            totals[window.document] += found.log_probability
        return totals

    def _scores(self, documents: list[np.ndarray], windows: list[Window]) -> list[Likelihood]:
        """Of each window, in their order."""
        unsized = np.zeros(self.run.experiment.vocab_size, np.int64)  # how many bytes they are is not asked
        found: dict[Window, Likelihood] = {}
        given = self.run.experiment, self.params, Encoded(documents), unsized
        for length, members in self._by_length(windows, [window.length for window in windows]):
            for window, score in score_windows(*given, members, length, pause=self.pause, int8=self.int8):
                found[window] = Likelihood(-float(score.nats), bool(score.correct == score.tokens))
        return [found[window] for window in windows]

    def _by_length(self, things: Sequence[Any], lengths: Sequence[int]) -> list[tuple[int, list[Any]]]:
        """In groups of what is padded to the same length, the longest first."""
        padded = [min(round_up(length), self.context) for length in lengths]
        each = sorted(set(padded), reverse=True)
        return [(n, [x for x, own in zip(things, padded, strict=True) if own == n]) for n in each]

    def go_on(self, prompts: Sequence[str], sampling: Sampling, new: int, until: Sequence[str] = ()) -> list[str]:
        """What the model adds to each prompt: ``new`` tokens at most, up to an end of text or the first of ``until``.

        UserError where the context has no room for ``new`` tokens and one before them.
        """
        check_sampling(sampling)
        room = self.context - new
        if room < 1:
            raise UserError(f"--tasks: {new} new tokens are asked for, and the model's context is {self.context}")
        ids = [self.run.begin(prompt) for prompt in prompts]
        if not all(ids):
            raise UserError("--tasks: a prompt is empty, and these weights have no token that starts a text")
        self.shortened += sum(len(one) > room for one in ids)
        ids = [one[-room:] for one in ids]
        tokenizer, experiment = self.run.tokenizer, self.run.experiment.program
        generator = Generator(experiment, sampling, tokenizer.end_ids, int8=self.int8)
        texts: dict[int, str] = {}
        for places, members in self._by_length(range(len(ids)), [len(one) + new for one in ids]):
            rows = max(1, TOKENS_AT_ONCE // places)
            for first in range(0, len(members), rows):
                self.pause()
                group = members[first : first + rows]
                given = [ids[i] for i in group]
                for found in continue_prompts(generator, self.params, given, new, seed=group[0], chunk=CHUNK):
                    here = [tokenizer.decode(one.ids) for one in found]
                    if all(one.ended or _cut(text, until) != text for one, text in zip(found, here, strict=True)):
                        break
                texts |= {i: _cut(text, until) for i, text in zip(group, here, strict=True)}
        return [texts[i] for i in range(len(ids))]


def _cut(text: str, until: Sequence[str]) -> str:
    """Up to the first of the texts that end it."""
    return text[: min((at for stop in until if stop and (at := text.find(stop)) >= 0), default=len(text))]
