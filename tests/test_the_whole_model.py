"""docs/the_whole_model.md is run: every command, in order, and every quoted line is in the command's output."""

import re
import shlex
from pathlib import Path

import pytest

from tests.runs.whole import inside, run

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "the_whole_model.md").read_text(encoding="utf-8")
STEPS = re.compile(r"^ {4}python -m transformer (.+)\n((?: {4}> .+\n)*)", re.M)
SMALL = {
    "train": (
        "--config.train.steps=2",
        "--config.train.warmup=1",
        "--config.train.eval_windows=4",
        "--config.train.prompts=a",
    ),
    "ablate": ("--windows=4",),
}


@pytest.mark.exhaustive  # a minute of compiling
def test_the_tutorial_runs_and_says_what_its_page_says(tmp_path: Path) -> None:
    outputs = []
    with inside(tmp_path):
        for line, quoted in STEPS.findall(PAGE):
            words = [re.sub("=experiments/", f"={ROOT}/experiments/", word) for word in shlex.split(line)]
            found = run(*words, *SMALL.get(words[0], ()), "--cache=cache")
            assert found.status == 0, (line, found.err)
            outputs.append(found.out)
            for wanted in re.findall(r"> (.+)\n", quoted):
                assert wanted in found.out, (line, wanted)
        assert (tmp_path / "page.html").is_file()
    assert len(outputs) >= 9 and PAGE.count("    > ") >= 5
    assert outputs[-1] == outputs[-2], "with and without a cache"
