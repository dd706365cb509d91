"""docs/the_whole_model.md is run: every command, in order, and every quoted line is in the command's output."""

from pathlib import Path

import pytest

from tests.runs.whole import done, inside, run
from tests.tutorial_page import PAGE, find, form, steps
from transformer.data.sentences import chances

# The page's own models are trained for two steps here, but that of sentences, whose chances are looked at.
SHORT = (
    "--config.train.steps=2",
    "--config.train.warmup=1",
    "--config.train.eval_windows=4",
    "--config.train.prompts=a",
)
SMALL = {"ablate": ("--windows=4",), "bench": ("--config.model.depth=1", "--config.model.context=16")}


def test_lines_that_are_quoted() -> None:
    assert form("  without block 1   +0.5225 ██  1,234.5 to -3 ") == "without block 0 0 0 to 0"
    assert find("~", "loss 1.5 at 3", "a\nloss 20 at 4 \n") == "loss 20 at 4"
    assert find(">", "loss 1.5 at 3", "a\nloss 20 at 4 \n") is None
    assert find("~", "loss 1.5 at 3", "loss 1.5 of 3") is None
    page = "    python -m transformer cost --x='a b'\n    > one\n    ~ 2\ntext\n    python -m transformer bench\n"
    assert [tuple(s) for s in steps(page)] == [
        (["cost", "--x=a b"], [(1, ">", "one"), (2, "~", "2")]),
        (["bench"], []),
    ]


@pytest.mark.exhaustive  # a minute and a half of compiling
def test_the_tutorial_runs_and_says_what_its_page_says(tmp_path: Path) -> None:
    page, outputs = PAGE.read_text(encoding="utf-8"), []
    with inside(tmp_path):
        for step in steps(page):
            short = SHORT if step.words[0] == "train" and "--workdir=runs/chased" not in step.words else ()
            found = run(*step.words, *short, *SMALL.get(step.words[0], ()), "--cache=cache")
            assert found.status == 0, (step.words, found.err)
            outputs.append(found.out)
            for _, mark, wanted in step.quoted:
                assert find(mark, wanted, found.out) is not None, (step.words, mark, wanted, found.out)
        assert (tmp_path / "page.html").is_file()
        for beginning in ("the cat chased", "the dog chased", "the cat chased the", "the fox watched"):
            said = done("inspect", "--run=runs/chased", f"--prompt={beginning}")["models"][0]["distribution"][-1]["top"]
            likely = {one["text"].strip(): one["probability"] for one in said}
            assert all(abs(likely[word] - chance) < 0.07 for word, chance in chances(beginning).items()), likely
    assert len(outputs) == page.count("\n    python -m transformer ") >= 15
    assert page.count("\n    > ") >= 5 and page.count("\n    ~ ") >= 20
    cached, anew = (out for step, out in zip(steps(page), outputs, strict=True) if step.words[0] == "sample")
    assert cached == anew, "with and without a cache"
