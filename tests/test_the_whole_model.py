"""docs/the_whole_model.md is run: every command, in order, and every quoted line is in the command's output."""

import contextlib
from pathlib import Path

import pytest

from tests.runs.whole import done, run
from tests.tutorial_page import PAGE, find, form, steps
from transformer.data.sentences import chances

# The page's models are trained for two steps here, but that of sentences, whose chances are looked at.
SHORT = ("--config.train.steps=2", "--config.train.warmup=1", "--config.train.eval_windows=4")
SMALL = {
    "train --workdir=runs/chased": (),
    "train --workdir=runs/demo": (*SHORT, "--config.model.width=24", "--config.tokenizer.vocab_size=512"),
    "train": SHORT,
    "ablate": ("--windows=4",),
    "bench": ("--config.model.depth=1", "--config.model.context=16"),
}


def test_lines_that_are_quoted() -> None:
    assert form("  without block 1   +0.5225 ██  1,234.5 to -3 ") == "without block 0 0 0 to 0"
    assert find("~", "loss 1.5 at 3", "a\nloss 20 at 4 \n") == "loss 20 at 4"
    assert find(">", "loss 1.5 at 3", "a\nloss 20 at 4 \n") is None
    assert find("~", "loss 1.5 at 3", "loss 1.5 of 3") is None
    assert find("~", "without 2: 0.7", "  without 1: 0.8\n without 2: 0.9\nwithout 3: 0.4") == "without 2: 0.9"
    page = "    python -m transformer cost --x='a b'\n    > one\n    ~ 2\ntext\n    python -m transformer bench\n"
    assert [tuple(s) for s in steps(page)] == [
        (["cost", "--x=a b"], [(1, ">", "one"), (2, "~", "2")]),
        (["bench"], []),
    ]


@pytest.mark.exhaustive  # a minute and a half of compiling
def test_the_tutorial_runs_and_says_what_its_page_says(tmp_path: Path) -> None:
    page, outputs = PAGE.read_text(encoding="utf-8"), []
    with contextlib.chdir(tmp_path):
        for step in steps(page):
            more = next((m for name, m in SMALL.items() if set(name.split()) <= set(step.words)), ())
            found = run(*step.words, *more, "--cache=cache")
            assert found.status == 0, (step.words, found.err)
            outputs.append(found.out)
            for _, mark, wanted in step.quoted:
                assert find(mark, wanted, found.out) is not None, (step.words, mark, wanted, found.out)
        assert (tmp_path / "page.html").is_file()
        for beginning in ("the cat chased", "the dog chased", "the cat chased the", "the fox watched"):
            said = done("inspect", "--run=runs/chased", f"--prompt={beginning}")["models"][0]["distribution"][-1]["top"]
            likely = {one["text"][1:]: one["probability"] for one in said if (one["text"] or "").startswith(" ")}
            assert all(abs(likely[word] - chance) < 0.12 for word, chance in chances(beginning).items()), likely
    assert len(outputs) == page.count("\n    python -m transformer ") >= 15
    assert page.count("\n    > ") >= 4 and page.count("\n    ~ ") >= 20
    cached, anew = (out for step, out in zip(steps(page), outputs, strict=True) if step.words[0] == "sample")
    assert cached == anew, "with and without a cache"
