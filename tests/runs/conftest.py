"""One working directory and one trained run for each module of tests."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.runs.whole import ACTS, EXPERIMENT, TRAIN, done, inside, text


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The working directory of this module, with an experiment and one text; relative names make equal settings."""
    folder = tmp_path_factory.mktemp("home")
    (folder / "experiment.py").write_text(EXPERIMENT)
    (folder / "acts.py").write_text(EXPERIMENT + ACTS)
    (folder / "text.txt").write_text(text(0))
    with inside(folder):
        yield folder


@pytest.fixture(scope="module")
def trained(home: Path) -> Path:
    """A run that was trained to its end."""
    result = done(*TRAIN, "--workdir=run")
    assert result["step"] == 12 and result["report"] == "run/report.html"
    return home / "run"
