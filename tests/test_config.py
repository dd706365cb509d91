"""An experiment: its file, its combinations, the settings that would do nothing."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from transformer.config import Experiment, call_file, check, load
from transformer.errors import UserError
from transformer.settings import digest, from_dict, leaves, override, to_dict
from transformer.study.study import repeat

EXPERIMENTS = sorted((Path(__file__).parents[1] / "experiments").glob("[!_]*.py"))
HEAD = "from transformer.config import Experiment\nfrom transformer.training.config import Train\n"


def refused(changes: dict[str, str]) -> str:
    """The one line that these changes are refused with."""
    changed = override(Experiment(), changes)
    with pytest.raises(UserError) as error:
        check(changed, given=changes)
    assert len(str(error.value).splitlines()) == 1
    return str(error.value)


def accepted(changes: dict[str, str]) -> Experiment:
    changed = override(Experiment(), changes)
    check(changed, given=changes)
    return changed


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str], str]:
    def write(text: str, name: str = "experiment.py") -> str:
        (tmp_path / name).write_text(text)
        return str(tmp_path / name)

    return write


@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda p: p.stem)
def test_every_experiment_file_loads_and_survives_json(path: Path) -> None:
    experiment = repeat(str(path), {}).baseline  # of an experiment's file the experiment, of a study's its baseline
    again = from_dict(Experiment, json.loads(json.dumps(to_dict(experiment))))
    assert again == experiment and again.name == experiment.name


@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda p: p.stem)
def test_every_experiment_file_says_question_command_result_and_cost(path: Path) -> None:
    text = path.read_text()
    docstring = text.split('"""')[1]
    assert "?" in docstring.splitlines()[0]
    assert "python -m transformer" in docstring and f"--config=experiments/{path.name}" in docstring
    assert "Expected:" in docstring and "Costs:" in docstring


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model.heads": "5"}, ["config.model.heads", "192", "5", "head_width"]),
        ({"model.attention.projection": "grouped", "model.attention.projection.kv_heads": "4"}, ["kv_heads", "6", "4"]),
        ({"model.attention.projection": "grouped", "model.attention.projection.kv_heads": "0"}, ["kv_heads", "0"]),
        ({"model.attention.projection": "grouped", "model.attention.projection.kv_heads": "12"}, ["kv_heads", "12"]),
        ({"model.positions": "rotary", "model.head_width": "3"}, ["positions", "rotary", "even", "3"]),
        ({"model.positions": "sinusoidal", "model.width": "5", "model.heads": "1"}, ["positions", "sinusoidal", "5"]),
        ({"model.positions": "rotary", "model.positions.base": "1"}, ["positions.base", "1"]),
        (
            {"model.positions": "rotary", "model.positions.scaling": "yarn", "model.positions.scaling.factor": "0.5"},
            ["positions.scaling.factor: 0.5", "1 or more"],
        ),
        ({"data.source": "a.txt", "data.validation": "2"}, ["data.validation: 2"]),
        ({"data.source": "a.txt,"}, ["data.source", "empty name"]),
        ({"data.piece_bytes": "8"}, ["data.piece_bytes: 8"]),
        ({"model.depth": "0"}, ["config.model.depth: 0"]),
        ({"model.context": "-1"}, ["config.model.context: -1"]),
        ({"model.head_width": "0"}, ["config.model.head_width: 0"]),
        ({"model.mlp.width": "0"}, ["config.model.mlp.width: 0"]),
        ({"model.dropout": "1"}, ["config.model.dropout: 1"]),
        ({"model.init_std": "0"}, ["config.model.init_std: 0"]),
        ({"model.norm.epsilon": "0"}, ["config.model.norm.epsilon: 0"]),
        ({"tokenizer.vocab_size": "1"}, ["config.tokenizer.vocab_size: 1"]),
        ({"train.steps": "0"}, ["config.train.steps: 0"]),
        ({"train.steps": str(1 << 31)}, ["config.train.steps", str(1 << 31)]),
        ({"train.batch": "6", "train.accumulate": "4"}, ["config.train.accumulate", "6", "4"]),
        ({"train.warmup": "2000"}, ["config.train.warmup", "2000", "1000"]),
        ({"train.learning_rate": "-1"}, ["config.train.learning_rate: -1"]),
        ({"train.clip": "0"}, ["config.train.clip: 0", "none"]),
        ({"train.label_smoothing": "1"}, ["config.train.label_smoothing: 1"]),
        ({"train.eval_windows": "0"}, ["config.train.eval_windows: 0"]),
        ({"train.schedule.final": "2"}, ["config.train.schedule.final: 2"]),
        ({"train.schedule": "warmup_stable_decay", "train.schedule.decay": "0"}, ["config.train.schedule.decay: 0"]),
        ({"train.optimizer.b2": "1"}, ["config.train.optimizer.b2: 1"]),
        ({"train.optimizer": "muon", "train.optimizer.momentum": "1"}, ["config.train.optimizer.momentum: 1"]),
        ({"train.optimizer.epsilon": "0"}, ["config.train.optimizer.epsilon: 0"]),
        ({"train.profile": "5"}, ["config.train.profile: 5"]),
        ({"train.profile": "5,4"}, ["config.train.profile: 5,4"]),
        ({"train.profile": "5,1001"}, ["config.train.profile: 5,1001", "1000"]),
        ({"train.seed": "-1"}, ["config.train.seed: -1"]),
        ({"train.seed": str(1 << 32)}, ["config.train.seed", str(1 << 32)]),
        ({"data.seed": "-1"}, ["config.data.seed: -1"]),
        ({"mesh.data": "0"}, ["config.mesh.data: 0"]),
        ({"mesh.data": "3"}, ["config.train.batch=16", "mesh.data=3"]),
        ({"train.batch": "8", "train.accumulate": "4", "mesh.data": "4"}, ["train.batch=8", "train.accumulate=4"]),
        ({"mesh.tensor": "4"}, ["config.mesh", "heads of 6", "mesh.tensor=4"]),
        ({"tokenizer.vocab_size": "2047", "mesh.tensor": "2"}, ["config.mesh", "vocab of 2047", "mesh.tensor=2"]),
    ],
)
def test_impossible_combinations_are_refused_with_the_numbers(changes: dict[str, str], words: list[str]) -> None:
    """C04: before any work, naming the setting and every number that took part; nothing is clamped."""
    text = refused(changes)
    assert all(word in text for word in words), text


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"model.head_width": "5", "model.heads": "5"},
        {"model.attention.projection": "grouped", "model.attention.projection.kv_heads": "6"},
        {"train.warmup": "1000", "train.schedule": "constant"},
        {"train.clip": "none", "train.eval_windows": "none", "model.mlp.width": "none"},
        {"train.profile": "1000,1000"},
        {"train.warmup": "1000", "train.schedule": "linear"},  # whose usual share is not the usual schedule's
        {"train.seed": str((1 << 32) - 1)},
        {"mesh.tensor": "2", "mesh.data": "2"},
    ],
)
def test_possible_ones_are_accepted(changes: dict[str, str]) -> None:
    accepted(changes)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"data.source": "a.txt", "data.weights": "1"}, "data.weights"),
        ({"data.validation": "0.2"}, "data.validation"),
        ({"data.validation": "0.1"}, "data.validation"),  # also where the value is the usual one
        ({"train.warmup": "1000", "train.schedule.final": "0.2"}, "train.schedule.final"),
        (
            {"train.warmup": "1000", "train.schedule": "warmup_stable_decay", "train.schedule.decay": "0.3"},
            "train.schedule.decay",
        ),
    ],
)
def test_a_setting_without_effect_is_refused(changes: dict[str, str], name: str) -> None:
    text = refused(changes)
    assert text.startswith(f"config.{name}: ") and "no effect" in text


def test_each_is_accepted_where_it_has_an_effect() -> None:
    accepted({"data.source": "a.txt,b.txt", "data.weights": "1,2", "data.validation": "0.2"})
    accepted({"train.schedule": "warmup_stable_decay", "train.schedule.decay": "0.3"})


def test_a_file_is_changed_by_dotted_names_and_checked(write: Callable[..., str]) -> None:
    path = write(HEAD + "def get_config():\n    return Experiment(train=Train(steps=100))\n")
    experiment = load(path, {"model.heads": "4", "train.warmup": "3e1"})
    assert (experiment.train.steps, experiment.model.heads, experiment.train.warmup) == (100, 4, 30)
    with pytest.raises(UserError, match=r"^config\.model\.dpth: model has no such setting \(did you mean 'depth'\?\)$"):
        load(path, {"model.dpth": "3"})
    with pytest.raises(UserError, match=r"config\.train\.warmup: 101 .* 100"):
        load(path, {"train.warmup": "101"})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("def get_config(:\n", "SyntaxError"),
        ("x = 1\n", "has no get_config()"),
        ("def get_config():\n    return 3\n", "returned int, not transformer.config.Experiment"),
        ("def get_config():\n    raise ValueError('first\\nsecond')\n", "ValueError: first second"),
        ("def get_config(x):\n    return x\n", "TypeError"),
        ("import no_such_module\n", "No module named 'no_such_module'"),
        ("import sys\nsys.exit(0)\n", "SystemExit"),
        ("get_config = 3\n", "TypeError"),
        (HEAD + "def get_config():\n    return Experiment(trian=Train())\n", "trian"),
        (HEAD + "def get_config():\n    return Experiment(train=Train(steps='5'))\n", "config.train.steps: '5'"),
        (HEAD + "def get_config():\n    return Experiment(train=Train(learning_rate=1))\n", "must be written 1.0"),
        (HEAD + "def get_config():\n    return Experiment(train=3)\n", "config.train"),
        (HEAD + "def get_config():\n    return Experiment(train=Train(steps=10**5000))\n", "config.train.steps"),
        ("a\x00b", "null bytes"),
    ],
)
def test_what_is_wrong_with_a_file_is_said_in_one_line(write: Callable[..., str], text: str, words: str) -> None:
    with pytest.raises(UserError) as error:
        load(write(text), {})
    assert words in str(error.value) and len(str(error.value).splitlines()) == 1


def test_a_missing_file_is_refused_with_the_nearest(write: Callable[..., str], tmp_path: Path) -> None:
    path = write("", "shakespeare.py")
    with pytest.raises(UserError, match=r"there is no file .*shakespear\.py \(did you mean .*shakespeare\.py'\?\)"):
        load(path.replace("shakespeare", "shakespear"), {})
    (tmp_path / "setup.py").touch()
    with pytest.raises(UserError) as error:
        load(str(tmp_path / "zzz.py"), {})
    assert "shakespeare.py" in str(error.value) and "setup.py" not in str(error.value)
    for wrong in (str(tmp_path), str(tmp_path / "no" / "file.py"), write("", "experiment.txt")):
        with pytest.raises(UserError, match=r"^--config: "):
            load(wrong, {})


def test_an_edited_file_is_read_anew(write: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Same size, same second: bytecode kept from before would pass for up to date."""
    monkeypatch.setattr("sys.dont_write_bytecode", False)
    for number in (2, 4):
        path = write(f"def get_config():\n    return {number}\n")
        os.utime(path, (1e9, 1e9))
        assert call_file(path, "get_config") == number
    assert [p.name for p in Path(path).parent.iterdir()] == ["experiment.py"], "nothing is left beside it"


def test_three_depths_are_three_runs() -> None:
    """C05: the name is the hash of the resolved settings, whichever way they were given."""
    named = {override(Experiment(), {"model.depth": str(d)}).name for d in (2, 4, 6)}
    assert len(named) == 3
    assert override(Experiment(), {"model.depth": "2e0"}).name == override(Experiment(), {"model.depth": "2"}).name


def test_the_vocabulary_is_the_tokenizers() -> None:
    assert override(Experiment(), {"tokenizer": "bytes"}).vocab_size == 257
    assert override(Experiment(), {"tokenizer": "unigram", "tokenizer.vocab_size": "400"}).vocab_size == 400


def test_defaults_are_valid_and_hash_by_value() -> None:
    check(Experiment())
    assert digest(Experiment()) == Experiment().name and "model.positions.kind" in leaves(Experiment())
