"""Rules of the house that no linter knows: legends, lengths, who imports whom, and settings that are alive.

Files are read as text or as syntax trees; models are traced and never run.
"""

import ast
import dataclasses
import functools
import re
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from tests import small
from transformer import config
from transformer.config import Experiment
from transformer.data.tokenizer import Bpe, Bytes
from transformer.errors import UserError
from transformer.model.positions import Rotary
from transformer.settings import hints, leaves, members, override
from transformer.study import study
from transformer.training.state import dials, init_params, init_state
from transformer.training.step import train_step

ROOT = Path(__file__).parent.parent
SOURCES = sorted((ROOT / "transformer").rglob("*.py"))
EXPERIMENTS = sorted(p for p in (ROOT / "experiments").rglob("*.py") if p.name != "__init__.py")
SUFFIX = re.compile(r"_([A-Z0-9h]*[A-Z][A-Z0-9h]*)$")  # q_BTNH, cos_BT1h
EQUATION = re.compile(r"[A-Z]+(,[A-Z]+)*->[A-Z]*")


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def letters_used(tree: ast.Module) -> set[str]:
    """The dimensions in names of arrays and in einsum equations."""
    found: set[str] = set()
    for node in ast.walk(tree):
        text = getattr(node, "id", None) or getattr(node, "arg", None) or getattr(node, "attr", None)
        if isinstance(text, str) and text != text.upper() and (match := SUFFIX.search(text)):
            found |= set(match[1])
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and EQUATION.fullmatch(node.value):
            found |= set(node.value) - set(",->")
    return {letter for letter in found if letter.isalpha() and letter.isupper()}


@pytest.mark.parametrize(
    "path", [p for p in SOURCES if re.search(r"\beinsum\(", p.read_text(encoding="utf-8"))], ids=name_of
)
def test_a_file_with_einsum_says_what_its_letters_mean(path):
    """In its docstring, as "B rows, T positions"."""
    legend = ast.get_docstring(tree_of(path)) or ""
    missing = {x for x in letters_used(tree_of(path)) if not re.search(rf"\b{x}( \w|,( and)? \w )", legend)}
    assert not missing, f"{name_of(path)}: no legend for {sorted(missing)}"


def test_some_files_have_einsum():
    assert letters_used(tree_of(ROOT / "transformer/model/grouped.py")) >= set("BTSDNKGH")


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_a_file_stays_under_400_lines(path):
    assert len(path.read_text(encoding="utf-8").splitlines()) < 400


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_the_library_stands_alone(path):
    """experiments/ and launch/ may be deleted without harm."""
    for node in ast.walk(tree_of(path)):
        imported = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            imported = [node.module or ""]
        assert not {name.split(".")[0] for name in imported} & {"experiments", "launch", "tests"}


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_no_default_hides_a_missing_setting(path):
    """Neither ``config.get("name", default)`` nor ``getattr(config, "name", default)``: settings exist or are wrong."""
    holders = {"c", "e", "config", "experiment", "model", "train", "data", "mesh", "settings", "kind", "schedule"}
    for node in ast.walk(tree_of(path)):
        if not isinstance(node, ast.Call):
            continue
        held = None
        if isinstance(node.func, ast.Attribute) and node.func.attr == "get" and len(node.args) + len(node.keywords) > 1:
            held = node.func.value
        elif isinstance(node.func, ast.Name) and node.func.id == "getattr" and len(node.args) == 3:
            held = node.args[0]
        if held is None or not isinstance(held, ast.Name | ast.Attribute):
            continue
        last = held.id if isinstance(held, ast.Name) else held.attr
        assert last not in holders, f"{name_of(path)}:{node.lineno}: a default for a setting"


def records(hint: Any) -> Iterator[type]:
    """Every class of settings below a type."""
    for cls in members(hint).values():
        yield cls
        for inner in hints(cls).values():
            yield from records(inner)


ALL_RECORDS = sorted(set(records(Experiment)), key=lambda c: (c.__module__, c.__name__))


@functools.cache
def names_read() -> set[str]:
    """Attributes that are read, and words in strings, anywhere in the library but in the functions that only check."""
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.FunctionDef) and node.name in ("check", "_check"):
            return
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            found.add(node.attr)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
            found.add(node.value)
        for child in ast.iter_child_nodes(node):
            visit(child)

    for path in SOURCES:
        visit(tree_of(path))
    return found


@pytest.mark.parametrize("cls", ALL_RECORDS, ids=lambda c: c.__name__)
def test_every_setting_is_read(cls):
    """A setting that is declared, checked and never used would be a lie."""
    assert set(hints(cls)) <= names_read(), set(hints(cls)) - names_read()


@pytest.mark.parametrize("path", EXPERIMENTS, ids=name_of)
def test_every_experiment_loads_and_its_model_can_be_built(path):
    """Checked as the command line checks it; the shapes of its weights follow without computing them."""
    tree = tree_of(path)
    assert ast.get_docstring(tree), "says the question, the command, the expected result and the cost"
    functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert functions & {"get_config", "get_study"}
    if "get_config" not in functions:
        arms = study.resolve(study.load(str(path), {}), lambda e: float(e.model.context))
        assert len(arms) > 1
        experiments = [arm.experiment for arm in arms]
    else:
        experiments = [config.load(str(path), {})]
    for e in experiments:
        built(e)


def built(e):
    shapes = jax.eval_shape(lambda: init_params(e))
    assert shapes["embedding"].shape == (e.vocab_size, e.model.width)


# Settings that act on the host only: text, files, how often something is done, how many devices. All others
# must change the program that initialises or that trains.
HOST = re.compile(
    r"data\..*|mesh\..*|tokenizer\.kind|train\.(batch|log_every|eval_every|eval_windows|checkpoint_every|keep|"
    r"max_skipped|init_from|profile|prompts)(\..*)?"
)
BASE = Experiment(
    model=small.experiment(depth=1, dropout=0.1, head_width=16, positions=Rotary()).model,
    tokenizer=Bpe(vocab_size=300),
    train=small.experiment().train,
)
# Where half or double the value, or one more, would be refused or would be the same.
OTHER: dict[str, Any] = {
    "model.width": 20,
    "model.heads": 2,
    "model.head_width": 6,
    "model.mlp.width": 40,
    "model.attention.projection.kv_heads": 4,
    "model.attention.projection.q_rank": 5,
    "model.attention.projection.rope_width": 8,
    "train.accumulate": 4,
    "train.clip": None,
    "model.attention.kernel": "blockwise",  # so few keys are for the plain one by itself
    "model.attention.span.blocks": ("global", "local"),
    "model.attention.span.local_base": 50.0,
    "model.attention.bias": "qkv",
    "model.attention.score_width": 8.0,
    "model.attention.scores.soft_cap": 1.5,
    "model.attention.scores.bias": 0.5,
    "model.logits_soft_cap": 1.5,
    "model.positions.scaling.original_context": 300,
    "model.positions.scaling.fast": 8.0,
    "model.positions.scaling.slow": 4.0,
    "model.stack": "scan",  # a shallow model is unrolled by itself
}


# What else a tag, or a setting, needs to be possible.
NEEDS = {
    "model.attention.span=pattern": {"model.depth": 2},
    "model.attention.span.local=global": {"model.attention.span.rotate_global": False},
}
DEEPER = {"model.attention.value_residual": {"model.depth": 2}}


def others(name: str, value: Any, hint: Any) -> list[Any]:
    """Other values of one setting."""
    if name in OTHER:
        return [OTHER[name]]
    if typing.get_origin(hint) is typing.Literal:
        return [x for x in typing.get_args(hint) if x != value]
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1]
    if isinstance(value, float):
        return [value / 2 if value else 0.1]
    raise AssertionError(f"{name}: say in OTHER what else than {value!r} it can be")


def alternatives(e: Experiment) -> dict[str, tuple[Experiment, dict[str, Any]]]:
    """Each setting of each kind once: a base in which it exists, and the change."""
    found: dict[str, tuple[Experiment, dict[str, Any]]] = {}

    def visit(base: Experiment, record: Any, path: str) -> None:
        for field, hint in hints(type(record)).items():
            name = f"{path}{field}"
            options = members(hint)
            if not options:
                if not HOST.fullmatch(name):
                    for i, other in enumerate(others(name, getattr(record, field), hint)):
                        label = f"{name} of {type(record).__name__}" + (f" ({i})" if i else "")
                        found[label] = (override(base, DEEPER.get(name, {})), {name: other})
                continue
            for tag, cls in options.items():
                here = base
                if cls is not type(getattr(record, field)):
                    if HOST.fullmatch(f"{name}.kind"):
                        continue
                    found[f"{name}={tag}"] = (base, {name: tag} | NEEDS.get(f"{name}={tag}", {}))
                    here = override(base, {name: tag} | NEEDS.get(f"{name}={tag}", {}))
                inner: Any = here
                for part in name.split("."):
                    inner = getattr(inner, part)
                visit(here, inner, name + ".")

    visit(e, e, "")
    return found


@functools.cache
def program(e: Experiment) -> str:
    """Initialisation and one step as text."""
    config.check(e)
    state = jax.eval_shape(lambda: init_state(e))
    step = jax.make_jaxpr(lambda s, b: train_step(e, s, b))(state, small.batch(e))
    constants = [np.asarray(x).tolist() for x in step.consts]
    return f"{jax.make_jaxpr(lambda: init_params(e))()}\n{step}\n{constants}"


CHANGES = alternatives(BASE)


@pytest.mark.parametrize("change", CHANGES)
def test_every_setting_changes_the_program(change):
    """Or is one of the host's. A setting without effect would make two runs that claim to differ."""
    base, changes = CHANGES[change]
    assert program(override(base, changes)) != program(base)


@pytest.mark.exhaustive
@pytest.mark.parametrize("change", CHANGES)
def test_one_executable_serves_runs_that_differ_in_nothing_it_depends_on(change):
    """`Experiment.program` leaves out what the compiled step is given, or does not depend on, and nothing else."""
    e = override(*CHANGES[change])
    state = jax.eval_shape(lambda: init_state(e))

    def step(experiment):
        return str(jax.make_jaxpr(lambda *x: train_step(experiment, *x))(state, small.batch(e), dials(e)))

    assert step(e) == step(e.program)
    other = override(e, {"train.seed": "7", "train.learning_rate": "0.5", "data.seed": "9"})
    assert other.program == e.program and init_text(other) == init_text(e)


def init_text(e):
    return str(jax.make_jaxpr(lambda seed: init_params(e.program, seed))(dials(e).seed))


def test_the_hosts_settings_do_not_change_the_program():
    """The list is of settings that exist, and of no others."""
    names = {name for name in leaves(Experiment()) if HOST.fullmatch(name)}
    assert {"data.seed", "mesh.tensor", "train.keep", "train.batch", "tokenizer.kind"} <= names
    quiet = override(BASE, {"train.keep": 9, "train.log_every": 3, "data.seed": 5, "train.prompts": "a,b"})
    assert program(quiet) == program(BASE)


def test_the_program_of_a_model_of_bytes_has_their_vocabulary():
    assert "f32[257,16]" in program(dataclasses.replace(BASE, tokenizer=Bytes()))


def test_a_setting_that_does_nothing_where_it_is_given_is_refused():
    """The few that types cannot rule out are in a table, each with its reason."""
    given = override(Experiment(), {"train.warmup": 1000, "train.schedule.final": 0.3})
    with pytest.raises(UserError, match=r"train.schedule.final: 0.3 has no effect here: the warm-up takes all steps"):
        config.check(given, given={"train.schedule.final"})


@pytest.mark.parametrize("name", ["requirements", "requirements-dev"])
def test_what_is_installed_is_locked_by_the_hash_of_every_file(name: str) -> None:
    """V02: the same versions in both files, each with hashes; what only other systems need comes on top."""

    def pins(text: str) -> set[tuple[str, str]]:
        found = re.findall(r"^([\w.\-]+)(?:\[[\w,]+\])?==([\w.]+)", text, re.MULTILINE)
        return {(re.sub("[-_.]+", "-", package).lower(), version) for package, version in found}

    lock = (ROOT / f"{name}.lock").read_text()
    wanted = (ROOT / f"{name}.txt").read_text()
    if name == "requirements-dev":
        wanted += (ROOT / "requirements.txt").read_text()
    entries = re.split(r"\n(?=\S)", lock.strip())
    elsewhere = [entry for entry in entries if re.search("sys_platform == '(win32|emscripten)'", entry)]
    assert pins(lock) - pins("\n".join(elsewhere)) == pins(wanted), "make lock"
    assert all(re.search(r"--hash=sha256:[0-9a-f]{64}", entry) for entry in entries)
