"""The clock behind the progress line."""

import time

import pytest

from tests import small
from transformer.training.progress import Progress


def test_R01_tokens_of_all_parts_of_an_update_count_and_compiling_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rows of 1,024 in each of 4 parts in 2 s: 4,096 tokens per second, not 1,024."""
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    said: list[str] = []
    progress = Progress(small.experiment(train={"batch": 8, "accumulate": 4, "steps": 10}), said.append)
    now[0] = 60.0
    assert progress.step(8192) is None
    for seconds in (62.0, 64.0):
        now[0] = seconds
        timing = progress.step(8 * 1024)
    assert timing == {"seconds": 4.0, "seconds_per_step": 2.0, "tokens_per_second": 4096.0}
    with progress.paused():
        now[0] = 1000.0
    progress.show(3, 1.5)
    assert said == ["step 3/10  loss 1.5000  4,096 tokens/s  left 0:14"]
    now[0] = 1002.0
    assert progress.step(8192) == {"seconds": 6.0, "seconds_per_step": 2.0, "tokens_per_second": 4096.0}
