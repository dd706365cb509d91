"""What a study has written down at every moment of it: results.json after each run, samples, the page. No training."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests import small
from transformer.errors import UserError
from transformer.study import runner
from transformer.study.report import REPORT
from transformer.study.runner import Failed, Runner
from transformer.study.study import RESULTS, Study

STUDY = Study(
    question="?", baseline=small.experiment(), arms={"other": {"train.clip": 0.5}}, seeds=(3, 4), metric="loss"
)
ORDER = [("baseline", 3), ("other", 3), ("baseline", 4), ("other", 4)]


class Killed(BaseException):
    """As SIGKILL: nothing handles it."""


class Stub(Runner):
    """Runs whose training is a number. ``ends`` has what happens instead to some of them."""

    ends: dict[tuple[str, int], BaseException]
    text = "hash of the text"

    def __init__(self, workdir: Path, **changed: Any):
        study = Study(**{name: getattr(STUDY, name) for name in STUDY.__slots__} | changed)
        super().__init__(study, workdir, workdir / "cache", [], lambda line: None)
        self.ends, self.trained, self.sampled = {}, [], []

    def bytes_per_row(self, experiment: Any) -> float:
        return 8.0

    def origin(self, experiment: Any) -> dict[str, str]:
        return {"config": experiment.name, "content_hash": self.text}

    def measure(self, experiment: Any, directory: Path) -> dict[str, Any]:
        place = (directory.parent.name, experiment.train.seed)
        self.trained.append(place)
        if place in self.ends:
            raise self.ends[place]
        return {"loss": 2 + 0.1 * place[1] ** 2 * len(place[0])}

    def sample(self, directory: Path) -> None:
        self.sampled.append((directory.parent.name, int(directory.name.removeprefix("seed_"))))


@pytest.fixture(autouse=True)
def untrained(monkeypatch: pytest.MonkeyPatch) -> None:
    def train_together(experiments: Any, places: list[Path], *_: Any) -> list[None]:
        for place in places:
            place.mkdir(parents=True, exist_ok=True)
        return [None] * len(places)

    monkeypatch.setattr(runner, "train_together", train_together)
    monkeypatch.setattr(runner, "write_report", lambda directory: (directory / REPORT).touch())


def done(workdir: Path) -> list[tuple[str, int]]:
    """The runs that results.json has."""
    arms = json.loads((workdir / RESULTS).read_text())["arms"]
    return [(a["name"], int(seed)) for seed in ("3", "4") for a in arms if a["seeds"].get(seed)]


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    Stub(tmp_path / "whole").run()
    return tmp_path / "whole"


def test_samples_are_of_each_arms_first_seed(tmp_path: Path) -> None:
    study = Stub(tmp_path / "study")
    study.run()
    assert study.trained == ORDER and study.sampled == ORDER[:2]
    assert done(tmp_path / "study") == ORDER and (tmp_path / "study" / REPORT).exists()


@pytest.mark.parametrize("killed", range(4))
def test_a_killed_study_has_the_results_so_far_and_ends_as_one_that_was_not(
    tmp_path: Path, whole: Path, killed: int
) -> None:
    first = Stub(tmp_path / "study")
    first.ends = {ORDER[killed]: Killed()}
    with pytest.raises(Killed):
        first.run()
    assert done(tmp_path / "study") == ORDER[:killed] and not (tmp_path / "study" / REPORT).exists()
    second = Stub(tmp_path / "study")
    second.run()
    assert second.trained == ORDER[killed:]
    assert (tmp_path / "study" / RESULTS).read_bytes() == (whole / RESULTS).read_bytes()


def test_results_that_are_there_are_not_forgotten_while_an_earlier_run_is_tried_again(
    tmp_path: Path, whole: Path
) -> None:
    workdir = tmp_path / "study"
    first = Stub(workdir)
    first.ends = {ORDER[0]: OSError("disk\nfull")}
    with pytest.raises(Failed, match=r"baseline/seed_3: OSError: disk full; the same command tries these again"):
        first.run()
    assert done(workdir) == ORDER[1:] and (workdir / REPORT).exists(), "what there is has its page"
    second = Stub(workdir)
    second.ends = {ORDER[0]: Killed()}
    with pytest.raises(Killed):
        second.run()
    assert done(workdir) == ORDER[1:]
    Stub(workdir).run()
    assert (workdir / RESULTS).read_bytes() == (whole / RESULTS).read_bytes()


def test_a_study_with_more_seeds_goes_on_with_what_it_has(tmp_path: Path, whole: Path) -> None:
    few = Stub(tmp_path / "study", seeds=(3,))
    few.run()
    more = Stub(tmp_path / "study")
    more.run()
    assert few.trained + more.trained == ORDER and more.sampled == []
    assert (tmp_path / "study" / RESULTS).read_bytes() == (whole / RESULTS).read_bytes()


def test_a_run_that_diverged_is_a_result(tmp_path: Path) -> None:
    study = Stub(tmp_path / "study")
    study.ends = {ORDER[1]: FloatingPointError("stopped at step 3")}
    results = study.run()
    assert results["arms"][1]["seeds"]["3"]["failed"] == "stopped at step 3"
    assert study.sampled == ORDER[:1] and results["arms"][1]["comparison"]["left_out"] == [3]
    again = Stub(tmp_path / "study")
    again.run()
    assert again.trained == []


def test_no_result_at_all_is_an_error_and_no_page(tmp_path: Path) -> None:
    study = Stub(tmp_path / "study")
    study.ends = {place: OSError("full") for place in ORDER}
    with pytest.raises(Failed):
        study.run()
    assert done(tmp_path / "study") == [] and not (tmp_path / "study" / REPORT).exists()


def test_no_learning_rate_is_chosen_while_a_tuning_run_is_to_be_tried_again(tmp_path: Path) -> None:
    rates = {"learning_rates": (0.1, 0.2, 0.3), "tuning_seed": 9}
    study = Stub(tmp_path / "study", **rates)
    study.ends = {("lr_0.2", 9): OSError("full")}
    with pytest.raises(Failed, match=r"lr_0.2/seed_9: OSError: full; the same command"):
        study.run()
    assert study.trained == [("lr_0.1", 9), ("lr_0.2", 9), ("lr_0.3", 9)]
    again = Stub(tmp_path / "study", **rates)
    again.run()
    assert again.trained[0] == ("lr_0.2", 9) and again.trained[1:4] == [(f"lr_0.{n}", 9) for n in (1, 2, 3)]


def test_a_changed_text_is_refused(tmp_path: Path, whole: Path) -> None:
    study = Stub(whole)
    study.text = "another"
    with pytest.raises(UserError, match="its text has changed"):
        study.run()
