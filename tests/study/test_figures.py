"""The figures of a study: what is drawn is where the numbers say."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.text import Text

from tests.study.on_disk import COMPARED, NOTHING, RATES, arm, compared, curve, rated, written
from transformer.study import figures
from transformer.study.directory import read_study


def drawn(figure: Any, label: str) -> list[Any]:
    return [line for line in figure.axes[0].lines if line.get_label() == label]


def test_the_differences_are_drawn_where_they_are() -> None:
    far = compared(difference=90.0, low=80.0, high=100.0, verdict="worse")
    single = compared(**NOTHING | {"difference": -0.2, "reason": "one"})
    none = compared(**NOTHING, verdict="not resolved", reason="none")
    arms = [arm("baseline"), *(arm(str(i), comparison=c) for i, c in enumerate([COMPARED, far, single, none]))]
    figure = figures.differences({"arms": arms, "metric": "loss", "better": "less"})
    found = drawn(figure, "interval")
    assert [list(line.get_xdata()) for line in found][::2] == [[-0.2234567, -0.0234567], [-0.2, -0.2]]
    shown = list(found[1].get_xdata())
    assert shown == [figures.FAR * 0.2234567] * 2, "one that is far off is cut, so that the others can be seen"
    assert [list(line.get_ydata()) for line in found] == [[3, 3], [2, 2], [1, 1]]
    said = [t.get_text() for t in figure.axes[0].texts]
    assert "-0.12, better" in said and "+90, worse" in said and "no number" in said
    assert "left is better" in figure.axes[0].get_xlabel()


@pytest.mark.parametrize(("along", "unit"), [("tokens", 32), ("flops", 7e8 / 40), ("seconds", None)])
def test_the_curves_are_the_means_of_the_seeds_that_finished(
    tmp_path: Path, along: figures.Along, unit: float | None
) -> None:
    failed = {("other", 1): "diverged"}
    directory = written(tmp_path, [arm("baseline"), arm("other", comparison=COMPARED)], failed=failed)
    figure = figures.curves(*read_study(directory), along)
    assert figure is not None
    for line, name, seeds in zip(drawn(figure, "mean"), ("baseline", "other"), ((0, 1, 2), (0, 2)), strict=True):
        values = np.array([list(curve(name, seed).values()) for seed in seeds])
        assert line.get_ydata() == pytest.approx(values.mean(0))
        steps = np.array([10, 20, 30, 40])
        expected = steps * unit if unit else (steps - 1) * np.mean([1 + seed for seed in seeds])
        assert line.get_xdata() == pytest.approx(expected)
        (band,) = (
            band for band in figure.axes[0].collections if band.get_facecolor()[0][:3] == pytest.approx(rgb(line))
        )
        heights = band.get_paths()[0].vertices[:, 1]
        assert (heights.min(), heights.max()) == pytest.approx((values.min(), values.max()))
    (broken,) = drawn(figure, "failed")
    assert list(broken.get_ydata()) == [curve("other", 1)[10], curve("other", 1)[20]]
    low, high = figure.axes[0].get_ylim()
    late = [curve(name, seed)[step] for name, seed in (("baseline", 2), ("other", 0)) for step in (20, 40)]
    assert low < min(late) and max(late) < high < curve("baseline", 0)[10], "the second half fills the frame"


def rgb(line: Any) -> tuple[float, ...]:
    colour = line.get_color()
    return tuple(int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))


def test_names_at_the_ends_of_lines_stand_apart(tmp_path: Path) -> None:
    """Twelve lines that end within a hair of each other; every name is told from its neighbours."""
    directory = written(tmp_path, [arm("baseline"), *(arm(f"a{i:02}", comparison=COMPARED) for i in range(12))])
    figure = figures.curves(*read_study(directory), "tokens")
    assert figure is not None
    figure.draw_without_rendering()
    middles = sorted((box.y0 + box.y1) / 2 for box in map(Text.get_window_extent, figure.axes[0].texts))
    assert len(middles) == 13
    apart = [above - below for below, above in itertools.pairwise(middles)]
    assert min(apart) > 9 * figure.dpi / 72, "no nearer than the letters are high"


def test_the_chosen_learning_rate_is_marked_and_what_failed_is_no_point() -> None:
    arms = [arm("baseline", learning_rate=rated(0.003, False, 3.4, 3.1, 3.3))]
    arms.append(arm("other", learning_rate=rated(0.001, True, 3.2, 3.3, None)))
    figure = figures.learning_rates({"arms": arms, "learning_rates": RATES, "metric": "loss"})
    assert figure is not None
    first, second = drawn(figure, "tried")
    assert list(first.get_xdata()) == RATES and list(first.get_ydata()) == [3.4, 3.1, 3.3]
    assert list(second.get_xdata()) == RATES[:2]
    filled = [line for line in figure.axes[0].lines if line.get_marker() == "o" and line.get_label() != "tried"]
    assert [(line.get_xdata()[0], line.get_ydata()[0]) for line in filled] == [(0.003, 3.1), (0.001, 3.2)]
    assert figures.learning_rates({"arms": arms, "learning_rates": [], "metric": "loss"}) is None
