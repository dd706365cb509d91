"""Runs chosen and ordered by settings and results: Python's own operators say what is right."""

import contextlib
import operator
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.runs.whole import run
from tests.study.written import names, write_run
from transformer.study import registry
from transformer.study.selection import in_order, select

# What a test of two values is, without our own code: Python's operators on the values that the runs were made with.
FIELDS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "model.depth": lambda e: e["depth"],
    "train.clip": lambda e: e["clip"],
    "train.learning_rate": lambda e: e["rate"],
    "model.bias": lambda e: e["bias"],
    "model.positions": lambda e: e["positions"],
    "model.positions.kind": lambda e: e["positions"],
    "model.positions.base": lambda e: 10000.0 if e["positions"] == "rotary" else KeyError,
    "step": lambda e: e["step"],
    "bits_per_byte": lambda e: KeyError if e["step"] < 10 else e["bits"] if e["step"] < 20 else 2.25,
    "state": lambda e: "done" if e["step"] == 20 else "stopped",
}
OPERATORS = {"=": "eq", "==": "eq", "!=": "ne", "<": "lt", "<=": "le", ">": "gt", ">=": "ge"}


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[registry.RunFiles], list[dict[str, Any]]]:
    """Runs of random settings and results, and what they were made with."""
    root, draw = tmp_path_factory.mktemp("many"), random.Random(0)
    made = []
    for number in range(24):
        entry: dict[str, Any] = {
            "name": f"{number:02}",
            "depth": draw.choice((1, 2, 3, 12)),
            "clip": draw.choice((None, 0.5, 1.0)),
            "rate": draw.choice((1e-3, 2e-3, 0.01)),
            "bias": draw.choice((True, False)),
            "positions": draw.choice(("learned", "rotary")),
            "step": draw.choice((5, 10, 15, 20)),
            "bits": draw.choice((2.5, 1.75, 10.5)),
        }
        write_run(
            root / entry["name"],
            step=entry["step"],
            bits=(entry["bits"], 2.25),
            model__depth=entry["depth"],
            train__clip=entry["clip"],
            train__learning_rate=entry["rate"],
            model__bias=entry["bias"],
            model__positions=entry["positions"],
        )
        made.append(entry)
    return registry.read_all(root, print), made


VALUES: dict[str, tuple[Any, ...]] = {
    "model.depth": (1, 2, 3, 12, 2.5),
    "train.clip": (None, 0.5, 1.0),
    "train.learning_rate": (1e-3, 2e-3, 0.01),
    "model.bias": (True, False),
    "model.positions": ("learned", "rotary"),
    "model.positions.kind": ("learned", "rotary"),
    "model.positions.base": (10000.0, 1.0),
    "step": (5, 10, 15, 20),
    "bits_per_byte": (2.5, 1.75, 10.5, 2.25),
    "state": ("done", "stopped"),
}


@pytest.mark.parametrize("name", FIELDS)
@pytest.mark.parametrize("sign", OPERATORS)
def test_the_runs_that_pass_a_test_are_those_that_python_finds(
    many: tuple[list[registry.RunFiles], list[dict[str, Any]]], name: str, sign: str
) -> None:
    runs, made = many
    for value in VALUES[name]:
        expected = []
        for entry in made:
            with contextlib.suppress(TypeError):  # none is neither smaller nor larger
                own = FIELDS[name](entry)
                if own is not KeyError and getattr(operator, OPERATORS[sign])(own, value):
                    expected.append(entry["name"])
        text = "none" if value is None else str(value).lower()
        assert [r.directory.name for r in select(runs, [f"{name}{sign}{text}"])] == expected
        both = select(runs, [f" {name} {sign} {text} ", "step>=10"])
        assert [r.directory.name for r in both] == [
            entry["name"] for entry in made if entry["name"] in expected and entry["step"] >= 10
        ]


@pytest.mark.parametrize("name", FIELDS)
def test_the_order_is_that_of_the_values_with_those_that_lack_it_last(
    many: tuple[list[registry.RunFiles], list[dict[str, Any]]], name: str
) -> None:
    runs, made = many

    def lacks(entry: dict[str, Any]) -> bool:
        return FIELDS[name](entry) in (KeyError, None)

    having = sorted((e for e in made if not lacks(e)), key=FIELDS[name])
    assert [r.directory.name for r in in_order(runs, name)] == [e["name"] for e in [*having, *filter(lacks, made)]]


def test_a_list_of_a_setting_is_asked_for_as_it_is_written(tmp_path: Path) -> None:
    write_run(tmp_path / "a", train__prompts="the cat,a dog")
    write_run(tmp_path / "b")
    assert names(tmp_path, "--where=train.prompts=the cat,a dog") == ["a"]
    assert names(tmp_path, "--where=train.profile=") == ["a", "b"]


def test_none_may_be_a_word(tmp_path: Path) -> None:
    write_run(tmp_path / "a", model__remat="full")
    write_run(tmp_path / "b")
    assert names(tmp_path, "--where=model.remat=none") == ["b"]
    assert names(tmp_path, "--where=train.init_from=none", "--where=train.init_from!=runs/a") == ["a", "b"]


def test_a_run_without_settings_is_left_out_of_a_choice_with_a_word(tmp_path: Path) -> None:
    write_run(tmp_path / "a")
    write_run(tmp_path / "c", model__depth=1)
    (write_run(tmp_path / "b") / "config.json").write_text("{")
    found = run("runs", "list", f"--root={tmp_path}", "--where=model.depth>1")
    assert found.err == f"{tmp_path / 'b'}: left out, its settings cannot be read\n"
    assert len(found.out.splitlines()) == 2
    assert names(tmp_path, "--where=state=damaged") == ["b"]
    nothing = run("runs", "list", f"--root={tmp_path}", "--where=model.depth>99", "--where=step=20")
    assert nothing.out == f"none of the 3 runs in {tmp_path} matches\n" and nothing.status == 0
