"""The study as written in a file: its arms, what it declares, and what is refused."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from tests import small
from transformer.config import Experiment
from transformer.data.prepare import Data
from transformer.data.tokenizer import Bpe, Bytes
from transformer.errors import UserError
from transformer.model.config import Model
from transformer.model.layers import declared_leaves
from transformer.settings import leaves
from transformer.study.study import AGAIN, BASELINE, Study, check, check_fields, folder, load, resolve, to_json
from transformer.training.config import Train
from transformer.training.state import declarations, init_params

BASE = Experiment(
    model=Model(depth=2, width=32, heads=4, context=16),
    tokenizer=Bytes(),
    data=Data(source="text.txt"),
    train=Train(steps=100, batch=4, warmup=10),
)


def study(**fields: Any) -> Study:
    return Study(**({"question": "?", "baseline": BASE, "seeds": (0, 1)} | fields))


def row(experiment: Experiment) -> float:
    return float(experiment.model.context)


def test_a_grid_is_every_combination_but_the_baseline() -> None:
    found = study(grid={"model.depth": (1, 2), "train.batch": (4, 8)}, arms={"wide": {"model.width": 64}}).changes()
    assert found == {
        "wide": {"model.width": 64},
        "depth=1, batch=4": {"model.depth": 1, "train.batch": 4},
        "depth=1, batch=8": {"model.depth": 1, "train.batch": 8},
        "depth=2, batch=8": {"model.depth": 2, "train.batch": 8},
    }


def test_an_arm_differs_from_the_baseline_in_what_it_declares_and_what_was_solved_for() -> None:
    s = study(grid={"model.depth": (1, 8)}, equal="parameters", accept=("block_parameters", "flops"))
    base, *arms = resolve(s, row)
    assert base.name == BASELINE and base.experiment == BASE and not base.changes and not base.solved
    for arm in arms:
        old, new = leaves(BASE), leaves(arm.experiment)
        differ = {name: new[name] for name in new if new[name] != old.get(name)}
        assert differ == arm.changes | arm.solved and "model.width" in arm.solved
        assert abs(arm.quantities["parameters"] / base.quantities["parameters"] - 1) <= 0.01


@pytest.mark.parametrize(
    "field",
    [
        {"question": 3},
        {"baseline": {"model": 1}},
        {"arms": {7: {}}},
        {"arms": {"rms": "model.norm"}},
        {"grid": {"model.depth": 3}},
        {"seeds": 3},
        {"seeds": ("a", "b")},
        {"seeds": (True,)},
        {"accept": "parameters"},
        {"learning_rates": ("1e-3",)},
        {"tuning_seed": 1.5},
        {"again": 1},
        {"lanes": "two"},
        {"budget_hours": "3"},
    ],
    ids=str,
)
def test_a_field_of_another_type_is_named(field: dict[str, Any]) -> None:
    ((name, value),) = field.items()
    with pytest.raises(UserError, match=re.escape(f"study.{name}: {value!r} is not ")):
        check_fields(study(**field))
    check_fields(study(learning_rates=[1e-3, 1], lanes=2, budget_hours=3))


def test_the_directory_of_an_arm() -> None:
    for name, wanted in {
        "depth=1, batch=4": "depth=1_batch=4",
        "норма": "норма",
        "a/../b": "a_.._b",
        "..": "_",
    }.items():
        assert folder(name) == wanted
    check(study(arms={"норма": {"model.norm": "rms_norm"}, "вращение": {"model.positions": "rotary"}}))


def test_the_share_of_the_tables() -> None:
    s = study(arms={"tied": {"model.tie_embeddings": True}}, accept=("parameters", "flops"))
    arms = resolve(s, row)
    for arm, tables in zip(arms, (2, 1), strict=True):
        size = tables * arm.experiment.vocab_size * arm.experiment.model.width
        assert to_json(s, arms)["arms"][arms.index(arm)]["tables"] == size / arm.quantities["parameters"]


def test_a_seed_is_that_of_weights_and_of_text_and_changes_nothing_else() -> None:
    base, again = resolve(study(again=True), row)
    assert again.name == AGAIN and again.experiment == base.experiment
    for arm, shift in ((base, 0), (again, 1_000_000)):
        found = arm.seeded(3, 0.5)
        assert (found.train.seed, found.data.seed, found.train.learning_rate) == (3 + shift, 3 + shift, 0.5)
        back = dataclasses.replace(
            found,
            data=BASE.data,
            train=dataclasses.replace(found.train, seed=0, learning_rate=BASE.train.learning_rate),
        )
        assert back == BASE


def test_two_arms_share_their_initial_weights_where_shapes_agree() -> None:
    """And another seed changes every weight that is drawn."""
    changes = {"rotary": {"model.positions": "rotary"}, "tied": {"model.tie_embeddings": True}}
    changes |= {"deeper": {"model.depth": 3}, "narrow MLP": {"model.mlp.width": 24}}
    s = study(arms=changes, accept=("parameters", "block_parameters", "flops"))
    base, *arms = resolve(s, row)

    def drawn(experiment: Experiment) -> dict[str, np.ndarray]:
        values = jax.tree.leaves(small.jit(init_params, static_argnums=0)(experiment))
        names = declared_leaves(declarations(experiment))
        return {name: np.asarray(x) for (name, w), x in zip(names.items(), values, strict=True) if w.role != "scale"}

    first, other = drawn(base.seeded(0)), drawn(base.seeded(1))
    assert all((first[name] != other[name]).all() for name in first)
    for arm in arms:
        found = drawn(arm.seeded(0))
        shared = first.keys() & found.keys()
        assert len(shared) >= len(first) - 1
        for name in shared:
            a, b = first[name], found[name]
            blocks = min(len(a), len(b)) if name.startswith("blocks/") else len(a)
            if a.shape[1:] == b.shape[1:]:
                scale = (2 / 3) ** 0.5 if arm.name == "deeper" and ("out/" in name or "down/" in name) else 1
                np.testing.assert_allclose(a[:blocks] * scale, b[:blocks], rtol=1e-6)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"metric": "bits_per_bite"}, ["study.metric", "'bits_per_byte'"]),
        ({"equal": "flops"}, ["study.equal", "'flops"]),
        ({"accept": ("flop",)}, ["study.accept", "'flops'"]),
        ({"seeds": ()}, ["study.seeds"]),
        ({"seeds": (1, 1)}, ["study.seeds", "(1, 1)"]),
        ({"seeds": (1000,), "learning_rates": (1e-3,)}, ["tuning_seed", "1000"]),
        ({"arms": {"a b": {"model.depth": 1}, "a/b": {"model.depth": 3}}}, ["'a b'", "'a/b'", "a_b"]),
        ({"arms": {"Baseline": {"model.depth": 1}}}, ["'Baseline'", "'baseline'"]),
        ({"arms": {"baseline": {"model.depth": 1}}}, ["'baseline' and 'baseline'"]),
        ({"arms": {"depth=1": {}}, "grid": {"model.depth": (1,)}}, ["two arms", "'depth=1'"]),
        ({"arms": {"seeded": {"train.seed": 3}}}, ["'seeded'", "train.seed"]),
        ({"arms": {"fast": {"train.learning_rate": 3}}, "learning_rates": (1e-3,)}, ["'fast'", "train.learning_rate"]),
    ],
)
def test_what_is_wrong_with_a_study_is_said_in_a_line(fields: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(UserError) as error:
        check(study(**fields))
    assert all(word in str(error.value) for word in words), error.value


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"arms": {"x": {"model.dept": 1}}}, ["'x'", "model.dept", "'depth'"]),
        ({"arms": {"x": {"model.heads": 5}}}, ["'x'", "config.model.heads"]),
        ({"arms": {"x": {"model.mlp": "swiglu", "model.mlp.width": 999}}}, ["'x'", "parameters", "flops", "accept"]),
        ({"arms": {"x": {"train.steps": 90}}}, ["'x'", "steps (100 to 90)", "flops"]),
        ({"arms": {"x": {"train.steps": 90}}, "equal": "tokens"}, ["'x'", "train.steps is changed by the arm"]),
        (
            {"arms": {"x": {"model.width": 64, "model.mlp.width": 9}}, "equal": "parameters"},
            ["'x'", "parameters can only be brought to within"],
        ),
    ],
)
def test_an_arm_that_cannot_be_or_that_changes_more_than_it_declares(fields: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(UserError) as error:
        resolve(study(**fields), row)
    assert all(word in str(error.value) for word in words), error.value


def test_what_is_accepted_passes_and_text_per_token_counts() -> None:
    """A larger vocabulary reads more text in as many tokens; held equal in bytes, it takes fewer steps."""
    base = dataclasses.replace(BASE, tokenizer=Bpe(vocab_size=300))

    def bytes_of(e: Experiment) -> float:
        return 16 * (2.0 if e.vocab_size == 300 else 2.5)

    arms = {"large": {"tokenizer.vocab_size": 600}}
    with pytest.raises(UserError, match=r"bytes \(12,800 to 16,000\)"):
        resolve(study(baseline=base, arms=arms, accept=("parameters", "flops")), bytes_of)
    accept = ("parameters", "flops", "steps", "tokens")
    _, large = resolve(study(baseline=base, arms=arms, equal="bytes", accept=accept), bytes_of)
    assert large.solved == {"train.steps": 80, "train.warmup": 8, "train.eval_every": 200}


def test_a_file_is_read_with_changes_to_all_arms(tmp_path: Path) -> None:
    file = tmp_path / "file.py"
    file.write_text("from tests.study.test_study import study\n\ndef get_study():\n    return study(again=True)\n")
    found = load(str(file), {"model.depth": "5"}, seeds=(7,), equal="tokens")
    assert (found.baseline.model.depth, found.seeds, found.equal) == (5, (7,), "tokens")
    with pytest.raises(UserError, match=r"config\.model\.dept"):
        load(str(file), {"model.dept": "5"})
    file.write_text("def get_study():\n    return 3\n")
    with pytest.raises(UserError, match=r"returned int, not transformer\.study\.study\.Study"):
        load(str(file), {})
