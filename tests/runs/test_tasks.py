"""A synthetic task from training to report, as a user runs it; and stopped, resumed and cut over devices."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest

from tests.runs.whole import done, refused, run
from transformer.analysis.answers import answer
from transformer.parallel.mesh import Mesh, make_mesh
from transformer.run import open_run
from transformer.training.metrics import read

FILE = """
from transformer.config import Experiment
from transformer.data.prepare import Data
from transformer.data.tasks.hops import Hops
from transformer.data.tokenizer import Symbols
from transformer.model.config import Model
from transformer.study.study import Study
from transformer.training.config import Train

def get_config():
    return Experiment(
        model=Model(depth=1, width=16, heads=2, context=16),
        tokenizer=Symbols(),
        data=Data(source=Hops(hops=2, text=15, validation=48)),
        train=Train(steps=6, batch=4, warmup=1, log_every=1, eval_every=3, checkpoint_every=3, eval_windows=16),
    )
"""
STUDY = (
    FILE
    + """
def get_study():
    return Study(
        question="?", baseline=get_config(), grid={"train.learning_rate": (1e-4,)}, seeds=(0, 1), metric="error"
    )
"""
)


@pytest.fixture(scope="module")
def task(home: Path) -> Path:
    (home / "task.py").write_text(FILE)
    (home / "study.py").write_text(STUDY.replace("def get_config", "def config").replace("=get_config()", "=config()"))
    done("train", "--config=task.py", "--workdir=task")
    return home / "task"


def test_a_task_is_trained_measured_and_shown(task: Path) -> None:
    found = json.loads((task / "evaluation.json").read_text())
    assert found["chance_error"] == 0.75 and found["difficulty"] == "hops" and "bits_per_byte" not in found
    assert found["answers"] == sum(row["answers"] for row in found["by_difficulty"])
    assert found["answers"] == sum(row["answers"] for row in found["by_position"])
    last = read(task / "metrics.jsonl")[-1]
    assert last["eval_answers"] < found["answers"] and 0 <= last["error/hops=2"] <= 1  # 16 of the 48 rows
    again = done("evaluate", "--run=task")
    assert again["by_position"] == found["by_position"] and again["loss"] == found["loss"]
    page = (task / "report.html").read_text()
    assert "by chance" in page and "Error by hops" in page and "bits per byte, " not in page and "gzip" not in page
    listed = done("runs", "list", "--root=.", "--where=data.source=hops", "--sort=error")["runs"]
    assert [row["run"] for row in listed] == ["task"]
    assert listed[0]["evaluation.error"] == found["error"] and listed[0]["bits_per_byte"] is None
    assert f"error {last['error']:.4f}" in run("runs", "list", "--root=.").out
    assert listed[0]["state"] == "done"
    step = done("runs", "reproduce", "--run=task", "--step=5")
    assert step["equals_record"] and step["rows"][0]["text"].split()[0] in ("0", "1", "2")


def test_a_task_that_was_stopped_ends_as_one_that_was_not(task: Path, home: Path) -> None:
    """Stopped by being given fewer steps than it would have is another run; so the checkpoint of step 6 is removed."""
    import shutil

    shutil.copytree(task, home / "half")
    shutil.rmtree(home / "half" / "checkpoints" / "6")
    (home / "half" / "evaluation.json").unlink()
    done("train", "--config=task.py", "--workdir=half")
    assert (home / "half" / "metrics.jsonl").read_bytes() == (task / "metrics.jsonl").read_bytes()
    assert json.loads((home / "half" / "evaluation.json").read_text())["loss"] == pytest.approx(
        json.loads((task / "evaluation.json").read_text())["loss"], abs=0
    )


@pytest.mark.exhaustive
@pytest.mark.parametrize("mesh", [{"data": 2}, {"context": 2}], ids=str)
def test_answers_are_the_same_on_several_devices(task: Path, mesh: dict[str, int]) -> None:
    import dataclasses

    found = json.loads((task / "evaluation.json").read_text())
    opened = open_run(task)
    e = dataclasses.replace(opened.experiment, mesh=Mesh(**mesh))
    with jax.set_mesh(make_mesh(e.mesh)):
        params, _ = dataclasses.replace(opened, experiment=e).params()
        report = answer(e, params).report()
    assert report["loss"] == pytest.approx(found["loss"], rel=1e-5)
    for name in ("by_difficulty", "by_position"):
        np.testing.assert_allclose(
            [row["error"] for row in report[name]], [row["error"] for row in found[name]], atol=0.03
        )


def test_a_study_of_a_task(task: Path, home: Path) -> None:
    result = done("study", "--config=study.py", "--workdir=tasks", "--lanes=1")
    assert result["metric"] == "error" and "comparison" in result["arms"][1]
    assert result["arms"][0]["quantities"]["bytes"] == 6 * 4 * 16
    assert "Error by hops" in (home / "tasks" / "report.html").read_text()
    assert (home / "tasks" / "figures" / "answers.pdf").exists()
    rows = (home / "tasks" / "answers.csv").read_text().splitlines()
    assert rows[0] == "arm,seed,by,value,answers,error" and len(rows) > 2 * 2 * 3
    assert "by_position" not in (home / "tasks" / "results.csv").read_text()
    bits = (home / "study.py").read_text().replace('metric="error"', 'metric="bits_per_byte"')
    (home / "bits.py").write_text(bits)
    assert "no bytes of text" in refused("study", "--config=bits.py", "--workdir=x")
    assert "no bytes of text" in refused("study", "--config=study.py", "--workdir=x", "--equal=bytes")


def test_what_makes_no_sense_on_a_task_is_refused(task: Path) -> None:
    assert "no text is read or continued" in refused("sample", "--run=task", "--prompt=1")
    assert "no text is read or continued" in refused("inspect", "--run=task", "--prompt=1")
    assert "no text is read or continued" in refused("ablate", "--run=task")
    assert "no text is read or continued" in refused("evaluate", "--run=task", "--text=text.txt")
    assert "--stride" in refused("evaluate", "--run=task", "--stride=4")
    assert "no effect here" in refused("train", "--config=task.py", "--workdir=x", "--config.train.prompts=1")
    assert "too short" in refused("train", "--config=task.py", "--workdir=x", "--config.model.context=8")
    assert not Path("x").exists()
