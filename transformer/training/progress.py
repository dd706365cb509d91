"""The progress line, and the clock behind it: evaluation, saving and compiling are not training time."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

from transformer.config import Experiment
from transformer.parallel.hosts import is_first


class Progress:
    """Counts tokens and seconds between two looks and says how fast and how long."""

    def __init__(self, experiment: Experiment, say: Callable[[str], None], seconds: float = 0.0):
        self._steps = experiment.train.steps
        self._say = say
        self._live = sys.stderr.isatty() and is_first()
        self._trained = seconds  # spent in steps, with those of earlier starts of the run
        self._mark: float | None = None  # when the clock was last looked at; None until the first step is over
        self._seconds, self._tokens, self._count = 0.0, 0, 0  # since the last look
        self._rate, self._pace = 0.0, 0.0
        self._shown = False

    def step(self, tokens: int) -> dict[str, float] | None:
        """A step is over: the speed since the last ``show``; None for the first step, which compiles."""
        now = time.perf_counter()
        if self._mark is None:
            self._mark = now
            return None
        self._seconds += now - self._mark
        self._trained += now - self._mark
        self._mark = now
        self._tokens += tokens
        self._count += 1
        self._rate = self._tokens / max(self._seconds, 1e-9)
        self._pace = self._seconds / self._count
        return {"seconds": self._trained, "seconds_per_step": self._pace, "tokens_per_second": self._rate}

    def show(self, step: int, loss: float) -> None:
        """Print the line and begin a new count."""
        left = _clock((self._steps - step) * self._pace) if self._pace else "-:--"
        line = f"step {step}/{self._steps}  loss {loss:.4f}  {self._rate:,.0f} tokens/s  left {left}"
        self._seconds, self._tokens, self._count = 0.0, 0, 0
        if self._live:
            print(f"\r{line}\x1b[K", end="", file=sys.stderr, flush=True)
            self._shown = True
        else:
            self._say(line)

    def say_line(self, line: str) -> None:
        """A line that stays, not overwritten by the next."""
        if self._shown:
            print(file=sys.stderr)
            self._shown = False
        self._say(line)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Time spent inside is not training time."""
        yield
        if self._mark is not None:
            self._mark = time.perf_counter()


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
