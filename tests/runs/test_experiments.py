"""Every file of experiments/, run to its end as a user runs it, in a tiny form: less of everything, the same arms."""

import json
from pathlib import Path

import pytest

from tests.runs.whole import ROOT, run
from tests.test_house import EXPERIMENTS, name_of
from transformer import config
from transformer.parallel.mesh import Mesh, sizes
from transformer.settings import tag_of
from transformer.study.study import repeat

TINY = {
    "data.source": "text.txt",
    "data.piece_bytes": "256",
    "tokenizer.kind": "bytes",
    "model.width": "64",
    "model.heads": "4",
    "model.head_width": "none",
    "model.mlp.width": "32",
    "model.context": "16",
    "train.steps": "2",
    "train.batch": "2",
    "train.warmup": "1",
    "train.eval_every": "2",
    "train.checkpoint_every": "2",
    "train.eval_windows": "2",
    "train.accumulate": "1",
} | {f"mesh.{axis}": "1" for axis in sizes(Mesh())}

# A study in its tiny form: one arm beside the baseline, and no tuning but in one of them. (Whether every arm can be
# built is tested in test_house.)
STUDY = """
import dataclasses
from experiments.{name} import get_study as whole


def get_study():
    study = whole()
    axes = {{name: values[-1:] for name, values in list(study.grid.items())[:1]}}
    arms = dict(list(study.arms.items())[-1:])
    return dataclasses.replace(study, arms=arms, grid=axes, learning_rates={rates})
"""
# Depths of 32, and vocabularies that a short text does not fill: by the study's own function.
FEWER = {
    "transfer": 'transfer import study\nPART = {"depths": (3,), "parametrisations": ("completep",), '
    '"learning_rates": (1e-3,)}',
    "transfer_rates": 'transfer_rates import study\nPART = {"depths": (2, 3), "rates": (2e-3, 1e-3)}',
    "vocabulary": 'vocabulary import study\nPART = {"base": 280, "sizes": (284,), "kinds": ("bpe",), "held": "steps"}',
    "vocabulary_parameters": 'vocabulary import study\nPART = {"base": 280, "sizes": (284,), "kinds": ("bpe",), '
    '"held": "parameters"}',
}


# Of a synthetic task the rows are small, not the text.
OF_A_TASK = {name: value for name, value in TINY.items() if not name.startswith(("data.", "tokenizer."))} | {
    "data.source.validation": "8"
}
SMALL_ROWS = {"hops": {"hops": "2", "text": "15"}, "recall": {"pairs": "3", "filler": "0"}}


def tiny(path: Path) -> dict[str, str]:
    found = repeat(str(path), {}).baseline
    if config.is_text(found):
        return TINY
    kind = tag_of(type(found.data.source))
    context = {"model.context": "40"} if kind == "recall" else {}  # an arm asks 24 positions later
    return OF_A_TASK | context | {f"data.source.{name}": value for name, value in SMALL_ROWS[kind].items()}


# One of each form is run with every change; all of them in `make exhaustive`.
OFTEN = ("final_norm", "hops_few", "shakespeare", "tiny")
MARKED = [
    pytest.param(path, marks=() if path.stem in OFTEN else pytest.mark.exhaustive, id=name_of(path))
    for path in EXPERIMENTS
]


@pytest.mark.parametrize("path", MARKED)
def test_every_experiment_runs_to_its_end(path: Path, home: Path) -> None:
    is_study = "def get_study" in path.read_text()
    changes = [f"--config.{name}={value}" for name, value in tiny(path).items()]
    is_text = config.is_text(repeat(str(path), {}).baseline)
    more = ["--seeds=2", "--lanes=1"] if is_study else ["--config.train.prompts="] if is_text else []
    if path.stem in FEWER:
        path = home / path.name
        path.write_text(f"from experiments.{FEWER[path.stem]}\ndef get_study():\n    return study(**PART)\n")
        if path.stem.startswith("vocabulary"):
            changes = [change for change in changes if "tokenizer" not in change]
    elif is_study:
        path = home / path.name
        path.write_text(STUDY.format(name=path.stem, rates="(1e-3, 1e-2)" if path.stem == "final_norm" else ()))
    workdir = home / path.stem
    found = run("study" if is_study else "train", f"--config={path}", f"--workdir={workdir}", *changes, *more, "--json")
    assert found.status == 0, found.err
    result = json.loads(found.out)
    assert (workdir / "report.html").stat().st_size > 10_000
    if is_study:
        assert len(result["arms"]) > 1
        assert all(row["mean"] > 0 and len(row["seeds"]) == 2 for row in result["arms"])
        assert all("verdict" in row["comparison"] for row in result["arms"][1:])
    else:
        assert result["bits_per_byte" if is_text else "error"] > 0


def test_a_study_is_not_trained_and_an_experiment_is_no_study(home: Path) -> None:
    study, config = (f"--config={ROOT / 'experiments' / name}.py" for name in ("depth", "tiny"))
    assert "python -m transformer study" in run("train", study, "--workdir=x").err
    assert "python -m transformer train" in run("study", config, "--workdir=x").err
    assert not Path("x").exists()
