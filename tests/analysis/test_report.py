"""The page of a run: self-contained, whole, and safe whatever a model or a user wrote."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from tests.page import EVIL, Page, loads_nothing
from transformer.analysis.report import curve, write_report
from transformer.config import Experiment
from transformer.data.tokenizer import Bytes
from transformer.errors import UserError
from transformer.model.config import Model
from transformer.settings import to_dict

EVALUATION = {
    "text": EVIL,
    "step": 4,
    "loss": 1.5,
    "perplexity": 4.48,
    "bits_per_byte": 2.1643,
    "xz_bits_per_byte": 2.81,
    "gzip_bits_per_byte": 3.24,
    "tokens": 1234,
    "bytes": 5678,
    "documents": 4,
    "window": 8,
    "stride": 4,
    "protocol": "each token scored once",
}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run's directory, written by hand; its name is hostile too."""
    directory = tmp_path / "a & <b>"
    directory.mkdir()
    experiment = Experiment(model=Model(depth=2, width=16, heads=4, context=8), tokenizer=Bytes())
    experiment = dataclasses.replace(experiment, data=dataclasses.replace(experiment.data, source=EVIL))
    (directory / "config.json").write_text(json.dumps(to_dict(experiment)))
    losses: list[dict[str, Any]] = [{"step": i, "tokens": 10 * i, "loss": 5.0 / i} for i in range(1, 5)]
    losses[1]["loss"] = None  # a skipped step
    records = [*losses, {"step": 4, "eval_loss": 1.5}]
    (directory / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    (directory / "samples.json").write_text(json.dumps([{"prompt": EVIL, "text": EVIL, "step": 4}]))
    (directory / "evaluation.json").write_text(json.dumps(EVALUATION))
    (directory / "provenance.json").write_text(json.dumps({"command": [EVIL], "host": EVIL, "uncommitted": EVIL}))
    timing = {"step": 4, "seconds": 2.0, "tokens_per_second": 1e4, "mfu": 0.25, "memory": 1 << 20}
    (directory / "timing.jsonl").write_text(json.dumps(timing) + "\n")
    return directory


def test_the_page_parses_and_shows_what_was_measured(run: Path) -> None:
    path = write_report(run)
    assert path == run / "report.html" and [p.name for p in run.glob("*.tmp")] == []
    text = path.read_text(encoding="utf-8")
    page = Page(text)
    assert text.startswith("<!doctype html>") and ("meta", {"charset": "utf-8"}) in page.elements
    assert page.words["title"] == page.words["h1"] == "a & <b>"
    for words in ("2.164", "2.81", "3.24", "4.48", "10,000", "1,234 tokens", "5,678 bytes", "window 8", "stride", "40"):
        assert words in text, words
    assert "arXiv:2204.02311" in text, "figures name their formula"


def test_it_is_self_contained(run: Path) -> None:
    """Nothing is loaded: no script, no link, no picture, no style from elsewhere."""
    text = write_report(run).read_text(encoding="utf-8")
    page = Page(text)
    loads_nothing(page, text)


def test_what_a_model_or_a_user_wrote_is_text_and_never_markup(run: Path) -> None:
    """Samples, prompts, the text's name, the command, the settings."""
    text = write_report(run).read_text(encoding="utf-8")
    page = Page(text)
    assert "<script" not in text and "<img" not in text
    assert page.words["pre"] == EVIL, "what the model wrote"
    assert page.words["b"].count(EVIL) == 1, "the prompt"
    assert EVIL in page.words["li"] and page.words["code"].count("<script>") == 3, "settings, command, host"


def test_the_curve_is_drawn_in_the_page(run: Path) -> None:
    text = write_report(run).read_text(encoding="utf-8")
    page = Page(text)
    assert [tag for tag, _ in page.elements].count("svg") == 1
    assert any(attributes.get("id") == "training" for _, attributes in page.elements)
    assert "validation" in text and "loss, nats per token" in text


def test_the_same_run_gives_the_same_page(run: Path) -> None:
    assert write_report(run).read_bytes() == write_report(run).read_bytes()


def test_only_steps_without_a_finite_loss_still_give_a_page(run: Path) -> None:
    (run / "metrics.jsonl").write_text('{"step": 1, "tokens": 0, "loss": null}\n')
    for name in ("evaluation", "samples", "provenance"):
        (run / f"{name}.json").unlink()
    (run / "timing.jsonl").unlink()
    Page(write_report(run).read_text(encoding="utf-8"))


def test_a_record_that_was_cut_off_by_a_kill_is_left_out(run: Path) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "lo')
    assert "step 4 of" in write_report(run).read_text(encoding="utf-8")


def test_a_damaged_record_is_said_with_its_place(run: Path) -> None:
    path = run / "metrics.jsonl"
    rows = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*rows[:2], rows[2][:9], "\n", *rows[3:]]))
    with pytest.raises(UserError, match=r"metrics\.jsonl: line 3 is not a record of a step"):
        write_report(run)


def test_records_that_are_lost_are_said_and_the_rest_is_shown(run: Path) -> None:
    (run / "metrics.jsonl").write_text("")
    page = write_report(run).read_text(encoding="utf-8")
    Page(page)
    assert "There are no records of its training" in page and "2.164" in page and "tokens trained" not in page


def test_no_records_no_page(run: Path) -> None:
    (run / "metrics.jsonl").write_text("")
    (run / "evaluation.json").unlink()
    with pytest.raises(UserError, match="has no records yet"):
        write_report(run)
    assert not (run / "report.html").exists()
    with pytest.raises(UserError, match="is not a run's directory"):
        write_report(run / "nothing")


def test_the_curve_alone_is_an_svg_without_a_date() -> None:
    text = curve([{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.0}], "answer")
    assert text.startswith("<svg") and text.rstrip().endswith("</svg>")
    assert "dc:date" not in text and "validation" not in text
    assert "nats per answer" in text
