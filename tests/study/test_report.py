"""The page of a study, its figures and its tables, on directories that are written here file by file."""

import contextlib
import csv
import io
import json
import shutil
import statistics
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.page import EVIL, Page, loads_nothing
from tests.study.on_disk import COMPARED, NOTHING, ODD, RATES, arm, compared, curve, rated, written
from transformer.__main__ import COMMANDS
from transformer.cli import main
from transformer.errors import UserError
from transformer.study.directory import Run, costs, read_study
from transformer.study.report import changes, origins, troubles, verdict, write_report
from transformer.study.study import AGAIN
from transformer.study.words import digits, probability, si


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three arms, one of them hostile in every text and with a failed run, one with a missing run; with its page."""
    directory = tmp_path_factory.mktemp("studies") / "a & <b>"
    directory.mkdir()
    unsure = compared(seeds=[0, 1], left_out=[2], verdict="not resolved", difference=0.0512345, low=-0.11, high=0.21)
    arms = [
        arm("baseline", learning_rate=rated(0.003, False, 3.4, 3.1, 3.3)),
        arm(
            "wide",
            comparison=compared(),
            changes={"model.width": 24},
            solved={"train.steps": 39},
            quantities={"steps": 39, "parameters": 1234},
            learning_rate=rated(0.01, True, 3.4, 3.3, 3.2),
        ),
        arm(ODD, comparison=unsure, changes={"data.source": EVIL}, learning_rate=rated(0.003, False, 3.2, 3.0, None)),
    ]
    written(directory, arms, failed={(ODD, 2): f"stopped {EVIL}"}, missing=(("wide", 1),), learning_rates=RATES)
    (directory / "study.json").write_text(json.dumps({"dropped": ["deep", EVIL], "budget_hours": 2.5}))
    place = directory / "arms" / "wide" / "seed_0" / "provenance.json"
    place.write_text(place.read_text().replace('"abc"', '"abd"'))
    with contextlib.redirect_stdout(io.StringIO()) as said:
        assert main(COMMANDS, ["report", str(directory), "--json"]) == 0
    assert json.loads(said.getvalue()) == {"report": str(directory / "report.html")}
    return directory


@pytest.fixture(scope="module")
def text(study: Path) -> str:
    return (study / "report.html").read_text(encoding="utf-8")


def test_the_page_is_whole_and_in_the_order_of_its_questions(text: str) -> None:
    page = Page(text)
    assert text.startswith("<!doctype html>") and page.words["title"] == "a & <b>"
    assert page.words["h1"] == f"Which is best? {EVIL}"
    headings = ["Verdicts", "Curves", "What a run costs", "What each arm changes", "Learning rates", "Samples"]
    places = [text.index(f"<h2>{heading}</h2>") for heading in headings]
    assert places == sorted(places)
    assert [tag for tag, _ in page.elements].count("svg") == 5
    for words in (
        "-0.12",
        "-0.22 to -0.02",
        "0.0081",
        "0.31",
        "0.26",
        "0.18",
        "settled",
        "77",
        "3.012",
        "0.034",
        "95%",
    ):
        assert words in text, words
    assert text.count("not resolved") >= 2 and 'class="better"' in text
    for words in ("1,234", "+23.4 %", "700 M", "4.9 KiB", "200 B", "model.width=24", "train.steps=39", "-2.50 %"):
        assert words in text, words
    assert "arXiv:2204.02311" in text, "figures name their formula"


def test_it_is_self_contained_and_no_id_is_there_twice(text: str) -> None:
    page = Page(text)
    loads_nothing(page, text)
    ids = Counter(attributes["id"] for _, attributes in page.elements if "id" in attributes)
    assert ids and set(ids.values()) == {1}
    used = {v[1:] for _, attributes in page.elements for k, v in attributes.items() if k == "xlink:href" and v}
    assert used and used <= set(ids), "what the figures use of themselves is still found"


def test_what_a_model_or_a_user_wrote_is_text_and_never_markup(text: str) -> None:
    """Names of arms, the question, failures, settings, samples, commands, hosts."""
    page = Page(text)
    assert "<script" not in text and "<img" not in text
    assert EVIL in page.words["h3"] and page.words["pre"].count(EVIL) == 3, "samples of each arm's first seed"
    assert page.words["b"].count(EVIL) == 3, "the prompts"
    assert EVIL in page.words["code"] and EVIL in page.words["th"] and page.words["li"].count(EVIL) >= 2


def test_what_failed_or_is_missing_is_said(text: str) -> None:
    said = Page(text).words
    assert "Unfinished: 8 of 9 runs are done." in said["b"]
    assert f"{ODD}, seed 2: failed: stopped {EVIL}" in said["li"] and "wide, seed 1: no result yet" in said["li"]
    assert "2 of 3" in said["b"], "the seeds an arm is judged by stand out where they are not all"
    assert "The runs differ in <b>commit</b>." in text and "wide, seed 0" in said["small"]
    assert "Not run, as 2.5 hours do not pay for them:" in said["b"] and f"deep, {EVIL}." in said["p"]
    assert "wide: 0.01" in said["li"] and "lies at the edge" in said["b"]


def test_the_same_directory_gives_the_same_bytes(study: Path, tmp_path: Path) -> None:
    copy = tmp_path / study.name
    shutil.copytree(study, copy)
    made = [p for p in sorted(copy.rglob("*")) if p.suffix in (".html", ".svg", ".pdf", ".csv")]
    assert len(made) == 1 + 2 * 5 + 3 and not list(study.rglob("*.tmp"))
    for path in made:
        path.unlink()
    write_report(copy)
    for path in made:
        assert path.read_bytes() == (study / path.relative_to(copy)).read_bytes(), path


def test_every_figure_is_a_file_of_its_own_without_a_date(study: Path) -> None:
    found = sorted(p.name for p in (study / "figures").iterdir())
    names = ["curves_flops", "curves_seconds", "curves_tokens", "differences", "learning_rates"]
    assert found == [f"{name}.{kind}" for name in names for kind in ("pdf", "svg")]
    for name in names:
        tree = ET.parse(study / "figures" / f"{name}.svg")  # well-formed, whatever an arm is called
        words = [e.text for e in tree.iter("{http://www.w3.org/2000/svg}text")]
        assert "wide" in words and any((word or "").startswith("漢 $x^2$ <script>") for word in words)
        pdf = (study / "figures" / f"{name}.pdf").read_bytes()
        assert pdf.startswith(b"%PDF") and b"Date" not in pdf and b"Type3" not in pdf
        assert "date" not in (study / "figures" / f"{name}.svg").read_text()


def table(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def same(cell: str, value: Any) -> bool:
    """Whether a cell of a CSV file is a value of a JSON file, to the last digit."""
    if value is None:
        return cell == ""
    if isinstance(value, list):
        return cell == " ".join(map(str, value))
    return type(value)(cell) == value


def test_the_tables_say_what_the_json_says(study: Path) -> None:
    results = json.loads((study / "results.json").read_text())
    runs = table(study / "results.csv")
    assert len(runs) == 9
    for row, (one, seed) in zip(runs, [(a, s) for a in results["arms"] for s in (0, 1, 2)], strict=True):
        result = one["seeds"][str(seed)]
        assert (row["arm"], row["seed"]) == (one["name"], str(seed))
        state = "missing" if result is None else "failed" if "failed" in result else "finished"
        assert row["state"] == state and same(row["learning_rate"], one["learning_rate"]["chosen"])
        assert all(same(row[name], value) for name, value in (result or {}).items())
        assert same(row["training_seconds"], 39 * (1 + seed) if state == "finished" else None)
        assert same(row["wall_seconds"], 60.0 * (1 + seed) if state == "finished" else None)
    for row, one in zip(table(study / "verdicts.csv"), results["arms"], strict=True):
        known = {name: value for name, value in one.get("comparison", {}).items() if name != "sd"}
        if known:
            known["difference_sd"] = one["comparison"]["sd"]
        known |= {"arm": one["name"], "mean": one["mean"], "sd": one["sd"], **one["quantities"], "tables": 0.37}
        assert all(same(row[name], value) for name, value in known.items())


def test_the_table_of_curves_has_every_validation(study: Path) -> None:
    rows = table(study / "curves.csv")
    assert len(rows) == 7 * 4 + 2, "seven runs to the end, and one to its half"
    for row in rows:
        step, seed, name = int(row["step"]), int(row["seed"]), row["arm"]
        steps = 39 if name == "wide" else 40
        assert float(row["tokens"]) == pytest.approx(step * 1280 / steps, rel=1e-12)
        assert float(row["flops"]) == pytest.approx(step * 7e8 / steps, rel=1e-12)
        assert float(row["seconds"]) == pytest.approx((step - 1) * (1 + seed), rel=1e-12), "read off between steps"
        assert float(row["bits_per_byte"]) == curve(name, seed)[step] and row["accuracy"] == ""
        assert float(row["loss"]) == curve(name, seed)[step] / 2


def test_no_run_no_page(tmp_path: Path) -> None:
    for content, words in ((None, "no run of this study has finished"), ("{", "is not JSON")):
        (tmp_path / "study.json").write_text("{}")
        if content:
            (tmp_path / "results.json").write_text(content)
        with pytest.raises(UserError, match=words):
            write_report(tmp_path)
    written(tmp_path, [arm("baseline")], missing=tuple(("baseline", seed) for seed in range(3)))
    with pytest.raises(UserError, match="no run of this study has finished"):
        write_report(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["results.json", "study.json"]


@pytest.mark.parametrize(
    "others",
    [
        [],  # nothing to compare with
        [arm("other", mean=None, sd=None, comparison=compared(**NOTHING, verdict="not resolved", reason="why"))],
        [arm(AGAIN, comparison=COMPARED)],
    ],
    ids=["one arm", "nothing could be tested", "the baseline is better than the baseline"],
)
def test_little_still_gives_a_page(tmp_path: Path, others: list[dict[str, Any]]) -> None:
    """One seed; records, times, origins and samples are gone; the only run of an arm failed; accuracy rises."""
    arms = [arm("baseline"), *others]
    directory = written(tmp_path, arms, (7,), failed={("other", 7): "diverged"}, metric="accuracy", better="more")
    for path in directory.rglob("arms/*/seed_7/*"):
        if path.name != "result.json":
            path.unlink()
    words = Page(write_report(directory).read_text(encoding="utf-8")).words
    assert "h3" not in words and not list((directory / "figures").glob("curves*"))
    assert (directory / "figures" / "differences.svg").exists() == bool(others)
    assert "Unfinished" not in words.get("b", "")
    names = [one["name"] for one in others]
    assert ("why" in words.get("small", "")) == ("other" in names)
    assert ("The baseline under other seeds came out better" in words.get("b", "")) == (AGAIN in names)


def test_a_changed_arms_run_is_found_beside_the_old_one(tmp_path: Path) -> None:
    directory = written(tmp_path, [arm("baseline")], (0,))
    old = directory / "arms" / "baseline" / "seed_0"
    new = old.with_name("seed_0.0080")
    shutil.copytree(old, new)
    (old / "result.json").write_text(json.dumps({"config": "of before"}))
    (old / "metrics.jsonl").write_text("")
    ((found,),) = read_study(directory)[1:]
    assert found.result is not None and found.result["config"] == "0080" and len(found.points) == 4


def test_what_a_run_costs_is_the_middle_of_those_that_finished(tmp_path: Path) -> None:
    directory = written(
        tmp_path,
        [arm("baseline"), arm("other", quantities={"flops": 7.7e8, "parameters": 900}, comparison=COMPARED)],
        failed={("other", 2): "diverged"},
    )
    place = directory / "arms" / "other" / "seed_1" / "provenance.json"
    place.write_text(json.dumps(json.loads(place.read_text()) | {"earlier": [{}]}))  # it was killed once
    base, other = costs(*read_study(directory))
    assert base["seconds"] == 120 and base["runs_per_hour"] == 30 and other["seconds"] == 60
    assert base["training_seconds"] == 78 and other["training_seconds"] == statistics.median([39, 78])
    assert base["memory"] == 200 and base["tokens_per_second"] == 4000
    assert base["tables"] == 0.37
    assert other["more"]["flops"] == pytest.approx(0.1) and other["more"]["parameters"] == pytest.approx(-0.1)


def test_what_an_arm_changes_besides_is_listed() -> None:
    base = arm("baseline")
    other = arm("other", quantities={"flops": 7.14e8, "parameters": 1005, "tokens": 1286.4})
    results = {"arms": [base, other], "equal": "tokens", "learning_rates": []}
    row = changes(other, results)
    assert row["miss"] == pytest.approx(0.005) and row["else"] == {"flops": pytest.approx(0.02)}
    assert row["learning_rate"] is None


def run(origin: dict[str, Any], **changed: Any) -> Run:
    given = {"arm": "a", "seed": 1, "result": {}, "points": [], "speed": None, "wall": None, "samples": []}
    return Run(origin=origin, **given | changed)


def test_where_runs_differ_in_their_origin_it_is_said_of_which() -> None:
    ours = {"commit": "abc", "host": "h", "versions": {"jax": "1", "numpy": "2"}, "uncommitted": "+x", "cores": 2}
    theirs = ours | {"commit": "abd", "uncommitted": "+y", "start": "2026-01-02", "end": "2026-01-03"}
    found = origins([run(ours), run(theirs, seed=2), run({}, seed=3), run(ours, seed=4), run(ours, arm="b")])
    assert (
        found["host"] == [("h", "")] and found["versions"] == [("jax 1, numpy 2", "")] and found["cores"] == [("2", "")]
    )
    assert found["commit"] == [("abc", "a, seeds 1, 4; b, seed 1"), ("abd", "a, seed 2")]
    assert len(found["uncommitted changes"]) == 2 and found["from, to"] == [("2026-01-02, 2026-01-03", "")]
    assert found["hash of the text"] == [("unknown", "")]
    assert origins([]) == {}


def test_every_run_without_a_number_is_a_trouble() -> None:
    good = {"bits_per_byte": 3.0}
    found = [run({}, result=good), run({}, seed=2, result=None), run({}, seed=3, result=None)]
    found += [run({}, seed=4, result={"bits_per_byte": None}), run({}, seed=5, result={"failed": "why"})]
    assert list(troubles({"metric": "bits_per_byte"}, found)) == [
        ("a, seed 4", "ended without a finite value"),
        ("a, seed 5", "failed: why"),
        ("a, seeds 2, 3", "no result yet"),
    ]


@pytest.mark.parametrize(
    ("changed", "shown"),
    [
        ({}, {"needed": "settled", "p": "0.0081", "least": "0.26", "used": "3 of 3", "whole": True}),
        ({"verdict": "not resolved"}, {"needed": "77", "smallest": "0.18", "interval": "-0.22 to -0.02"}),
        ({"verdict": "not resolved", "seeds_needed": None}, {"needed": "> 1000"}),
        ({"verdict": "not resolved", "seeds_needed": None, "smallest_effect": None}, {"needed": None, "smallest": ""}),
        ({"low": None, "high": None}, {"difference": "-0.12", "interval": ""}),
        ({"seeds": [0, 2]}, {"used": "2 of 3", "whole": False}),
        ({"p_holm": 3e-7}, {"p": "< 0.0001"}),
    ],
)
def test_a_row_of_the_verdicts(changed: dict[str, Any], shown: dict[str, Any]) -> None:
    row = verdict(arm("other", comparison=compared(**changed)), [0, 1, 2])
    assert {name: row[name] for name in shown} == shown


def test_numbers_in_words() -> None:
    assert [digits(2.63119, 0.149), digits(-0.03238, 0.0206, "+"), digits(5.0, None)] == ["2.63", "-0.032", "5"]
    assert [digits(123456.7, 2300.0), digits(1e-12, 3e-12), digits(None, 1.0)] == ["1.23e+05", "1e-12", ""]
    assert [probability(1.0), probability(0.0001), probability(0.00009), probability(None)] == [
        "1",
        "0.0001",
        "< 0.0001",
        "",
    ]
    assert [si(0), si(999.4), si(999.6), si(1700167680), si(2e22)] == ["0", "999", "1 k", "1.7 G", "2e+04 E"]
