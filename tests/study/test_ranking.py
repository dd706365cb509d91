"""The order of arms through the training."""

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transformer.study.directory import Run
from transformer.study.ranking import in_words, ranking

NAMES = ("a", "b", "c", "d")


def run(arm: str, seed: int, values: list[float | None], every: int = 10, **changed: Any) -> Run:
    points = [{"step": every * (k + 1), "loss": value} for k, value in enumerate(values)]
    result = {"loss": values[-1] if values else None}
    made = Run(arm=arm, seed=seed, result=result, points=points, speed=None, wall=None, origin={}, samples=[])
    return dataclasses.replace(made, **changed)


def results(better: str = "less", names: tuple[str, ...] = NAMES[:3]) -> dict[str, Any]:
    return {"metric": "loss", "better": better, "arms": [{"name": name} for name in names]}


# Means: a 3, 2, 1; b 1, 1.5, 2; c 2, 3, 3. The third arm takes twice the steps, measured as often.
RUNS = [
    run("a", 0, [2, 1, 0]),
    run("a", 1, [4, 3, 2]),
    run("b", 0, [1, 1.5, 2]),
    run("c", 0, [2, 3, 3], every=20),
]


def test_orders_by_hand() -> None:
    found = ranking(results(), RUNS)
    assert found is not None
    assert [row["order"] for row in found] == [["b", "c", "a"], ["b", "a", "c"], ["a", "b", "c"]]
    assert [row["same"] for row in found] == [pytest.approx(x) for x in (1 / 3, 2 / 3, 1)]
    assert [row["share"] for row in found] == [pytest.approx(x) for x in (1 / 3, 2 / 3, 1)]
    assert (
        in_words(found)
        == "a is first from 100% of the training on, and the whole order is that of the end from 100% on."
    )
    more = ranking(results("more"), RUNS)
    assert more is not None and [row["order"][0] for row in more] == ["a", "c", "c"]
    assert in_words(more).startswith("c is first from 67% of the training on")


def test_a_measurement_just_before_the_last_one_is_left_out() -> None:
    """Step 32 is the last and no multiple of 10; one that comes a whole interval later is one of its own."""
    late = run("b", 0, [1, 1.5, 9, 2])
    late.points[-1]["step"] = 32
    assert ranking(results(), [*RUNS[:2], late, RUNS[3]]) == [
        row | {"share": pytest.approx(share)}
        for row, share in zip(ranking(results(), RUNS) or [], (0.326389, 0.652778, 1), strict=True)
    ]
    assert ranking(results(), [*RUNS[:2], run("b", 0, [1, 1.5, 9, 2]), RUNS[3]]) is None


def test_none_where_there_is_no_order() -> None:
    assert ranking(results(names=NAMES[:2]), RUNS) is None
    unfinished = [run("a", 0, [1, 2], result=None), *RUNS[2:]]
    assert ranking(results(), unfinished) is None
    assert ranking(results(), [run("a", 0, [3, 2]), *RUNS[2:]]) is None, "curves of other lengths"
    assert ranking(results(), [run("a", 0, [3, None, 2]), *RUNS[2:]]) is None
    assert ranking(results(), []) is None
    four = ranking(results(names=NAMES), [*RUNS, run("d", 0, [1, 2, 2.5], result={"failed": "why"})])
    assert four is not None and all("d" not in row["order"] for row in four)


@given(st.lists(st.permutations(range(4)), min_size=2, max_size=6))
def test_same_counts_pairs(orders: list[list[int]]) -> None:
    runs = [run(name, 0, [float(order[i]) for order in orders]) for i, name in enumerate(NAMES)]
    found = ranking(results(names=NAMES), runs)
    assert found is not None and len(found) == len(orders)
    for row, order in zip(found, orders, strict=True):
        alike = [(order[i] < order[j]) == (orders[-1][i] < orders[-1][j]) for i in range(4) for j in range(i + 1, 4)]
        assert row["same"] == pytest.approx(sum(alike) / 6)
        assert [order[NAMES.index(name)] for name in row["order"]] == [0, 1, 2, 3]
    whole = next(k for k in range(len(orders)) if all(o == orders[-1] for o in orders[k:]))
    assert f"from {(whole + 1) / len(orders):.0%} on." in in_words(found)
