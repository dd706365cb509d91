"""Synthetic tasks: every answer by a solver that reads the row as a person would, chance, order, settings."""

import dataclasses
import itertools
import math
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
import pytest

from tests import small
from transformer.analysis import answers
from transformer.analysis.answers import judged
from transformer.config import Experiment, changed, check
from transformer.data.loader import batch_hash
from transformer.data.permutation import mix
from transformer.data.prepare import Data
from transformer.data.tasks.draws import Draws, mixed
from transformer.data.tasks.source import TaskLoader, held_out
from transformer.data.tasks.task import HELD_OUT, TRAINING, Task, batch_of, make
from transformer.data.tokenizer import Symbols, SymbolTokenizer
from transformer.errors import UserError
from transformer.model.config import Model
from transformer.settings import from_dict, leaves, override, to_dict

Answer = tuple[str, int] | None  # the symbol and how hard it is; None where nothing is asked


def hops(row: list[str]) -> list[Answer]:
    count, text = int(row[0]), row[1:]
    found: list[Answer] = [None]
    for place in range(len(text)):
        at: int | None = place
        for _ in range(count):
            before = [i for i in range(at) if text[i] == text[at]] if at is not None else []
            at = before[-1] + 1 if before else None
        found.append(None if at is None else (text[at], count))
    return found


def recall(row: list[str]) -> list[Answer]:
    blanks = row.count(".")
    pairs = (len(row) - blanks) // 3
    known = [(row[2 * i], row[2 * i + 1]) for i in range(pairs)]
    keys = [key for key, _ in known]
    asked = row[2 * pairs + blanks :]
    return [None] * (2 * pairs + blanks) + [(dict(known)[key], pairs - keys.index(key)) for key in asked]


def arranged(order: Callable[[list[str]], list[str]]) -> Callable[[list[str]], list[Answer]]:
    def solve(row: list[str]) -> list[Answer]:
        bar = row.index("|")
        wanted = order(row[:bar])
        assert row[bar + 1 :] == wanted[:-1]  # the answers are read as they come
        return [None] * bar + [(symbol, bar) for symbol in wanted]

    return solve


def addition(row: list[str]) -> list[Answer]:
    total = int(row[0]) + int(row[1])
    return [None, None, (str(total % 11), int(total >= 11))]


def permutations(row: list[str]) -> list[Answer]:
    found: list[Answer] = []
    things = list(range(len(row[0])))
    for number, factor in enumerate(row, start=1):
        things = [int(factor[thing]) for thing in things]
        found.append(("".join(map(str, things)), number))
    return found


def brackets(row: list[str]) -> list[Answer]:
    closing, still, found = dict(zip("([{<", ")]}>", strict=True)), [], list[Answer]()
    for symbol in row:
        if symbol in closing:
            still.append(closing[symbol])
        else:
            assert still.pop() == symbol
        found.append((still[-1], len(still)) if still else None)
    return found


CASES: dict[str, tuple[dict[str, object], Callable[[list[str]], list[Answer]]]] = {
    "hops": ({"hops": 4, "characters": 3, "text": 20}, hops),
    "recall": ({"pairs": 3, "keys": 5, "values": 4, "filler": 2}, recall),
    "copy": ({"most": 5, "kinds": 3}, arranged(lambda x: x)),
    "reverse": ({"most": 5, "kinds": 3}, arranged(lambda x: x[::-1])),
    "sort": ({"most": 5, "kinds": 3}, arranged(sorted)),
    "modular_addition": ({"modulus": 11}, addition),
    "permutations": ({"things": 4, "factors": 6}, permutations),
    "brackets": ({"kinds": 4, "text": 18, "deepest": 3}, brackets),
}


def task_of(name: str, **more: object) -> Task:
    changes = {f"source.{key}": value for key, value in (CASES[name][0] | {"validation": 200} | more).items()}
    source = override(Data(), {"source": name} | changes).source
    assert isinstance(source, Task)
    return source


def experiment_of(task: Task) -> Experiment:
    model = Model(depth=1, width=8, heads=2, context=task.length)
    return Experiment(model=model, tokenizer=Symbols(), data=Data(source=task))


judge_logits = small.jit(answers.judge_logits)
each = pytest.mark.parametrize("name", CASES)


def test_every_task_has_a_solver() -> None:
    from transformer.data.tasks.source import AnyTask
    from transformer.settings import members

    assert set(CASES) == set(members(AnyTask))


@each
def test_every_answer_is_the_solvers(name: str) -> None:
    task = task_of(name)
    rows = make(task, 7, np.arange(300))
    asked = 0
    for b in range(300):
        there = rows.present_BT[b]
        symbols = [task.symbols[i] for i in rows.tokens_BT[b][there]]
        wanted = CASES[name][1](symbols)
        assert len(wanted) == len(symbols) and not rows.asked_BT[b][~there].any()
        for t, answer in enumerate(wanted):
            assert rows.asked_BT[b, t] == (answer is not None)
            if answer is not None:
                found = rows.answers_BT[b, t]
                assert (task.symbols[found], rows.difficulty_BT[b, t]) == answer
                assert found in task.answers
                asked += 1
    assert asked > 200


@each
def test_a_uniform_guess_scores_chance_and_an_oracle_one(name: str) -> None:
    task = task_of(name)
    e = experiment_of(task)
    guess = jnp.full((len(task.symbols),), -jnp.inf).at[np.array(task.answers)].set(0.25)

    def uniform(tokens: np.ndarray, positions: np.ndarray, segments: np.ndarray, targets: np.ndarray):
        return judge_logits(jnp.broadcast_to(guess, (*targets.shape, guess.size)), targets)

    report = judged(e, uniform).report()
    assert report["accuracy"] == pytest.approx(task.chance, rel=1e-6)
    assert report["error"] == pytest.approx(report["chance_error"])
    assert report["loss"] == pytest.approx(math.log(len(task.answers)), rel=1e-5)
    assert all(
        row["error"] == pytest.approx(1 - task.chance) for row in report["by_difficulty"] + report["by_position"]
    )

    def oracle(tokens: np.ndarray, positions: np.ndarray, segments: np.ndarray, targets: np.ndarray):
        # It reads the rows and solves them: the targets that it is given are only what it is judged by.
        logits = np.zeros((*tokens.shape, len(task.symbols)), np.float32)
        for b in range(tokens.shape[0]):
            row = [task.symbols[i] for i, there in zip(tokens[b].tolist(), segments[b].tolist(), strict=True) if there]
            for t, answer in enumerate(CASES[name][1](row)):
                if answer is not None:
                    logits[b, t, task.symbols.index(answer[0])] = 50
        return judge_logits(jnp.asarray(logits), targets)

    report = judged(e, oracle).report()
    assert report["error"] == 0 and report["loss"] < 1e-6


def test_scores_by_difficulty_and_position_are_those_of_the_rows() -> None:
    """A model that answers every row of one hop right and no other; positions counted by hand."""
    task = task_of("hops")
    e, rows = experiment_of(task), held_out(task, np.arange(200))

    def partly(tokens: np.ndarray, positions: np.ndarray, segments: np.ndarray, targets: np.ndarray):
        right = jnp.asarray(tokens)[:, :1] == 1
        return jnp.zeros(targets.shape), jnp.broadcast_to(right, targets.shape).astype(jnp.float32)

    for group in (7, 200, 512):  # rows at once: the last group may lack some
        report = judged(e, partly, rows=group).report()
        assert [row["error"] for row in report["by_difficulty"]] == [1, 0, 1, 1, 1]
        one = rows.tokens_BT[:, 0] == 1
        for row in report["by_position"]:
            asked = rows.asked_BT[:, row["value"]]
            assert row["answers"] == asked.sum()
            assert row["error"] == pytest.approx(1 - (asked & one).sum() / asked.sum())
        assert report["answers"] == rows.asked_BT.sum()
    assert judged(e, partly, count=50).report()["answers"] == rows.asked_BT[:50].sum()


@each
def test_rows_are_a_function_of_seed_and_number(name: str) -> None:
    task = task_of(name)
    loader = TaskLoader(task, seed=3, batch=8, context=task.length + 2)
    whole = loader.batch_at(5)
    assert batch_hash(whole) == batch_hash(TaskLoader(task, 3, 8, task.length + 2).batch_at(5))  # after a resume
    rows = make(task, 3, np.arange(40, 48))
    np.testing.assert_array_equal(whole.weights_BT[:, : task.length], rows.asked_BT)
    np.testing.assert_array_equal(whole.targets_BT[:, : task.length], np.where(rows.asked_BT, rows.answers_BT, 0))
    for hosts in (2, 4):
        parts = [loader.batch_at(5, range(first, first + 8 // hosts)) for first in range(0, 8, 8 // hosts)]
        for joined, wanted in zip(map(np.concatenate, zip(*parts, strict=True)), whole, strict=True):
            np.testing.assert_array_equal(joined, wanted)
    assert batch_hash(TaskLoader(task, 3, 4, task.length + 2).batch_at(10)) == batch_hash(
        loader.batch_at(5, range(4))
    )  # the stream of rows does not depend on the batch
    others = [loader.batch_at(6), TaskLoader(task, 4, 8, task.length + 2).batch_at(5)]
    others.append(batch_of(make(task, 3, np.arange(40, 48), HELD_OUT), task.length + 2))
    assert len({batch_hash(b) for b in [whole, *others]}) == 4
    assert whole.segments_BT[:, task.length :].sum() == whole.weights_BT[:, task.length :].sum() == 0
    with loader.iterate(5) as batches:
        assert batch_hash(next(batches)) == batch_hash(whole)


GOLDEN = {
    "hops": "e9a2220c60ce",
    "recall": "697236f31966",
    "copy": "9806a0542be3",
    "reverse": "c62c4b29e5d3",
    "sort": "9a2df3becb99",
    "modular_addition": "fce682e33305",
    "permutations": "ebffc63b8bb2",
    "brackets": "32154b45c0c3",
}


def test_the_rows_of_a_seed_stay_what_they_are() -> None:
    """Changing these changes every result on a task: raise task.FORMAT with it."""
    hashes = {name: batch_hash(batch_of(make(task_of(name), 0, np.arange(16)), 32))[:12] for name in CASES}
    assert hashes == GOLDEN


def test_draws_are_uniform_and_apart() -> None:
    draws = Draws(1, np.arange(20_000))
    for limit in (2, 7, 120):
        counts = np.bincount(draws.below(limit, 3).reshape(-1), minlength=limit)
        expected = 60_000 / limit
        assert ((counts - expected) ** 2 / expected).sum() < limit + 5 * math.sqrt(2 * limit) + 5  # chi square
    assert not (draws.bits(3) == draws.bits(3)).any()
    orders = Draws(2, np.arange(24_000)).order(4)
    counts = np.array(list(zip(*np.unique(orders, axis=0, return_counts=True), strict=True)), dtype=object)
    assert len(counts) == 24 and all(abs(count - 1000) < 160 for _, count in counts)
    values = np.array([0, 1, 2**63, 2**64 - 1], np.uint64)
    assert [int(x) for x in mixed(values)] == [mix(int(x)) for x in values]
    bits = Draws(1, np.arange(50)).bits(50)
    assert len(np.unique(np.concatenate([bits, Draws(2, np.arange(50)).bits(50)]))) == 5000


def test_hops_are_never_twice_the_same_and_its_curriculum_begins_with_few() -> None:
    task = task_of("hops", curriculum=10)
    rows = make(task, 0, np.arange(60))
    text = rows.tokens_BT[:, 1:]
    assert (text[:, 1:] != text[:, :-1]).all()
    most = [rows.tokens_BT[first : first + 10, 0].max() for first in range(0, 60, 10)]
    assert most[0] <= 1 and sorted(most) == most and max(most) == 4
    for number, asked in enumerate(rows.tokens_BT[:, 0].tolist()):
        assert asked <= 1 + number // 10
    assert set(make(task, 0, np.arange(10), HELD_OUT).tokens_BT[:, 0]) >= {2, 3, 4}  # which has all from the start


def test_brackets_reach_the_depth_that_is_allowed() -> None:
    rows = make(task_of("brackets"), 0, np.arange(50))
    assert rows.difficulty_BT.max() == 3


def test_the_table_of_modular_addition_is_parted() -> None:
    task = task_of("modular_addition", share=0.25)
    trained, held = (
        {tuple(row[:2]) for row in make(task, seed, np.arange(5000), stream).tokens_BT.tolist()}
        for seed, stream in ((4, TRAINING), (0, HELD_OUT))
    )
    assert not trained & held and len(trained) == 30 and len(held) == 91
    assert trained == {tuple(row[:2]) for row in make(task, 9, np.arange(5000)).tokens_BT.tolist()}


def test_products_of_permutations_are_a_group() -> None:
    from transformer.data.tasks.groups import products

    for things in (2, 3, 5):
        table = products(things)
        size = math.factorial(things)
        assert sorted(table[0]) == list(range(size)) and (table[0] == np.arange(size)).all()
        assert all(len(set(row)) == size for row in (*table, *table.T))
    elements = list(itertools.permutations(range(3)))
    for (i, first), (j, second) in itertools.product(enumerate(elements), repeat=2):
        assert elements[products(3)[i, j]] == tuple(second[first[n]] for n in range(3))


WRONG = {
    "data.source.hops=-1": "too small for hops",
    "data.source.text=1": "too small for hops",
    "data.source.text=60": "positions",
    "data.source.characters=1": "too small",
    "data.source.validation=0": "too few",
    "data.source.pairs=3": "hops has no such setting",
    "data.source=hop": "did you mean 'hops'",
    "tokenizer=bytes": "set symbols",
    "train.prompts=a": "no effect here",
    "data.weights=1": "no effect here",
    "data.validation=0.2": "no effect here",
    "data.piece_bytes=128": "no effect here",
    "data.text_field=x": "no effect here",
    "data.source=recall data.source.pairs=40": "config.data.source.keys: 32 is too small",
    "data.source=modular_addition data.source.share=0": "no cell",
    "data.source=modular_addition data.source.share=1": "no cell",
    "data.source=permutations data.source.things=7": "up to 6",
    "data.source=brackets data.source.kinds=9": "up to 8",
    "data.source=sort data.source.kinds=1": "too small for sort",
    "data.source=shakespeare data.source.hops=3": "is a plain value",
    "data.source.kind=shakespeare": "is not valid",
    "data.source=text.txt tokenizer=symbols": "symbols are for a synthetic task",
}


@pytest.mark.parametrize("words", WRONG)
def test_what_is_wrong_is_one_line(words: str, tmp_path, monkeypatch) -> None:
    from transformer.data.corpora import source

    base = dataclasses.replace(experiment_of(task_of("hops")), model=Model(context=50))
    changes = dict(word.split("=", 1) for word in words.split())
    with pytest.raises(UserError, match=WRONG[words]) as found:
        new = changed(base, changes)
        if isinstance(new.data.source, str):
            check(new, given=changes)
            source(new.data.source, "text", tmp_path)
        check(new, given=changes)
    assert len(str(found.value).splitlines()) == 1


def test_a_task_brings_its_symbols_along_and_a_text_its_tokenizer() -> None:
    task = changed(Experiment(), {"data.source": "hops", "data.source.hops": "3"})
    assert isinstance(task.tokenizer, Symbols) and task.vocab_size == 4 + 4
    assert changed(task, {"data.source": "x.txt"}).tokenizer == Experiment().tokenizer
    assert changed(task, {"data.source": "x.txt", "tokenizer": "bytes"}).vocab_size == 257
    assert changed(task, {"data.source": "copy"}).vocab_size == 17
    assert from_dict(Experiment, to_dict(task)) == task
    assert leaves(task)["data.source.kind"] == "hops" and "data.source" not in leaves(task)
    assert leaves(Experiment())["data.source"] == "shakespeare"


def test_symbols_are_read_and_written(tmp_path) -> None:
    from transformer.data.tokenizer import load

    tokenizer = SymbolTokenizer(task_of("hops").symbols)
    tokenizer.save(tmp_path)
    again = load(Symbols(), tmp_path)
    assert again.fingerprint == tokenizer.fingerprint
    assert again.decode(again.encode("2  a b c")) == "2 a b c"
    assert [again.describe(i) for i in (0, 5)] == ["0", "a"]
    with pytest.raises(UserError, match="is not a symbol"):
        again.encode("2 z")
    with pytest.raises(UserError, match="cannot read"):
        load(Symbols(), tmp_path / "none")
