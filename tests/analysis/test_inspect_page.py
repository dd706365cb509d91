"""The page of `inspect` in a real Chromium: what it shows, how it is used, and that nothing in a prompt is markup."""

import json
import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from tests import small
from tests.analysis.test_inspect import run_of
from tests.browser import Watched, chromium, shown
from tests.page import EVIL
from transformer.analysis import inspection
from transformer.analysis.inspect_page import packed, write_inspection
from transformer.analysis.inspection import Inspection, inspect
from transformer.model.attention import Attention
from transformer.model.linear import Linear
from transformer.model.positions import Alibi, None_, Relative, Rotary
from transformer.model.spans import Sliding

__all__ = ["chromium"]  # the fixture
PROMPT = "the cat sat é"


@pytest.fixture(scope="module")
def found() -> dict[str, Inspection]:
    """Models on one prompt, and one on a hostile prompt; of the second kind of positions each."""
    fast = small.jit(inspection._pass.__wrapped__, static_argnums=0)
    patch = pytest.MonkeyPatch()
    patch.setattr(inspection, "_pass", fast)

    def one(name: str, prompt: str, **model: Any) -> Inspection:
        run, params = run_of(Path(name), 160, **model)
        return inspect(run, params, 7, prompt)

    models = {
        "plain": one("plain", PROMPT),
        "deep": one("deep", PROMPT, depth=3, heads=2, positions=Rotary(), attention=Attention(span=Sliding(window=3))),
        "evil": one("a & <b>", EVIL + "\x00\u202e שלום 👩\u200d🚀\n", depth=1, positions=Alibi()),
        "start": one("start", "", depth=1, positions=None_()),
        "signed": one("signed", PROMPT, depth=1, heads=2, attention=Attention(projection=Linear())),
        "relative": one("relative", "ab", depth=1, positions=Relative()),
    }
    patch.undo()
    return models


def page_of(tmp_path: Path, *found: Inspection, position: int = 4) -> Path:
    return write_inspection(tmp_path / "page.html", list(found), position)


def chosen(page: Watched) -> list[int]:
    """The position that each model is at, as its strip says."""
    script = (
        "[...document.querySelectorAll('.strip')].map(s => [...s.children].findIndex(c => c.ariaChecked === 'true'))"
    )
    return page.run(script)


def words(page: Watched, selector: str) -> list[str]:
    return page.run(f"[...document.querySelectorAll({json.dumps(selector)})].map(e => e.textContent)")


def test_the_numbers_on_the_page_are_those_of_the_pass(
    chromium: Any, found: dict[str, Inspection], tmp_path: Path
) -> None:
    """As the page's script unpacks them, to 1e-5; and what it writes for the chosen position."""
    one = found["plain"]
    with shown(chromium, page_of(tmp_path, one)) as page:
        length = len(one.tokens)
        weights = page.run(
            f"Array.from({{length: 2}}, (_, p) => Array.from({{length: 4}}, (_, n) => Array.from({{length: {length}}}, "
            f"(_, t) => Array.from({{length: {length}}}, (_, s) => models[0].weight(p, n, t, s)))))"
        )
        assert np.abs(np.array(weights) - one.weights_PNTS).max() < 1e-5
        likely = page.run("models[0].likely")
        assert np.abs(np.array(likely[-1]) - one.said.probabilities[-1]).max() < 1e-6
        assert np.abs(np.array(likely[0]) - one.said.probabilities[0, :, :5]).max() < 1e-6
        bars = words(page, ".box.wide .said .percent")
        top = one.said.probabilities[-1, 4]
        assert [float(re.match(r"[\d.]+", bar)[0]) for bar in bars[:20]] == pytest.approx(
            (100 * top).tolist(), rel=0.05
        )
        figures = words(page, ".numbers b")
        rank, p = one.said.next_rank[-1, 4], one.said.next_probability[-1, 4]
        assert figures[1:] == [f"{rank:,}", f"{-np.log2(p):.2f} bits", f"{one.said.entropy[-1, 4]:.2f} bits"]
        assert len(words(page, ".box.wide .said .true")) == 1, "the true next token is marked, once"
        assert words(page, ".box h3")[0].startswith("Token") and len(words(page, ".heads button")) == 8
        lens = words(page, ".lens tbody td.chosen")
        assert len(lens) == 3, "the embedding and two blocks"


def test_weights_below_zero_are_told_from_the_others(
    chromium: Any, found: dict[str, Inspection], tmp_path: Path
) -> None:
    """In numbers to 1e-5, in the map by their colour, in the list by their sign, the largest first."""
    one = found["signed"]
    with shown(chromium, page_of(tmp_path, one, position=len(one.tokens) - 1)) as page:
        T = range(len(one.tokens))
        weights = page.run(
            "JSON.stringify([0, 1].map(n => models[0].tokens.map((_, t) => models[0].tokens.map((_, s) => "
            "models[0].weight(0, n, t, s)))))"
        )
        weights_NTS = np.array(json.loads(weights))
        assert np.abs(weights_NTS - one.weights_PNTS[0]).max() < 1e-5 and weights_NTS.min() < -0.01
        first = sorted(one.weights_PNTS[0, 0, -1].tolist(), key=lambda w: -abs(w))[:8]
        listed = words(page, ".pairs div:first-child .percent")
        read = [float(w.replace("−", "-").removesuffix(" %")) / 100 for w in listed]
        assert read == pytest.approx(first, rel=0.05)
        pixels = page.run(
            "[...document.querySelector('.map canvas').getContext('2d').getImageData(0, 0, "
            "models[0].T, models[0].T).data]"
        )
        reds = np.array(pixels).reshape(len(T), len(T), 4)[..., 0]
        seen = np.abs(weights_NTS[0]) > 0.02
        below, above = (set(reds[seen & side].tolist()) for side in (weights_NTS[0] < 0, weights_NTS[0] > 0))
        assert below and above and max(below) < min(above), "blue and orange"


def test_positions_are_chosen_with_the_mouse_and_the_keyboard(
    chromium: Any, found: dict[str, Inspection], tmp_path: Path
) -> None:
    with shown(chromium, page_of(tmp_path, found["plain"])) as page:
        last = len(found["plain"].tokens) - 1
        assert chosen(page) == [4]
        steps = [
            ("ArrowRight", 5),
            ("ArrowLeft", 4),
            ("Home", 0),
            ("ArrowLeft", 0),
            ("End", last),
            ("ArrowRight", last),
        ]
        for key, place in steps:
            page.page.keyboard.press(key)
            assert chosen(page) == [place]
            assert words(page, "#spoken")[0].startswith(f"Position {place} of {last + 1}"), "for screen readers"
        assert "ends here" in words(page, ".box.wide")[0] and len(words(page, ".numbers b")) == 1
        page.page.locator(".strip button").nth(2).click()
        assert chosen(page) == [2] and words(page, ".box dd")[0] == "2"
        before = words(page, ".below h3")[0]
        page.page.locator(".heads button").nth(1).hover()
        assert words(page, ".below h3")[0] == "Block 1, head 2: who attends to whom" != before
        shares = page.run(
            "[...document.querySelectorAll('.strip button')].map(c => +c.style.getPropertyValue('--share'))"
        )
        wanted = [0.9 * found["plain"].weights_PNTS[0, 1, 2, s] ** 0.7 for s in range(3)]
        assert shares[:3] == pytest.approx(wanted, abs=2e-3), "who attends to whom shows in the prompt"
        page.page.mouse.move(5, 5)
        assert words(page, ".below h3")[0] == before, "only looked at"
        page.page.locator(".heads button").nth(1).click()
        page.page.mouse.move(5, 5)
        assert words(page, ".below h3")[0].startswith("Block 1, head 2")
        page.page.locator(".lens td").nth(0).click()
        assert chosen(page) == [0]
        page.page.keyboard.press("Tab")
        assert page.run("document.activeElement !== document.body"), "reached by keyboard"
        labels = page.run("[...document.querySelectorAll('.heads button')].map(b => b.getAttribute('aria-label'))")
        assert all(re.fullmatch(r"Block \d, head \d: position 0 takes .* from position 0, .*", x) for x in labels)
        named = "e => e.getAttribute('aria-label') || e.ariaHidden === 'true'"
        assert page.run(f"[...document.querySelectorAll('button, canvas, [role=img]')].every({named})")


def test_two_models_side_by_side_follow_each_other(chromium: Any, found: dict[str, Inspection], tmp_path: Path) -> None:
    with shown(chromium, page_of(tmp_path, found["plain"], found["deep"])) as page:
        assert words(page, ".model > h2") == ["plain", "deep"] and chosen(page) == [4, 4]
        left, right = (page.page.locator(".model").nth(i).bounding_box() for i in range(2))
        assert left["y"] == right["y"] and left["x"] + left["width"] <= right["x"]
        page.page.locator(".model").nth(1).locator(".strip button").nth(6).click()
        assert chosen(page) == [6, 6]
        page.page.keyboard.press("ArrowRight")
        assert chosen(page) == [7, 7]
        assert "sliding, 3" in words(page, ".box h3 small")
        assert len(words(page, ".dials line")) == 0 or page.run("document.querySelectorAll('.dials line').length") == 4


@pytest.mark.parametrize("size", [(390, 844), (700, 450), (1400, 900)], ids=["phone", "zoom 200 %", "desktop"])
def test_it_fits_phones_zoom_and_print(
    chromium: Any, found: dict[str, Inspection], tmp_path: Path, size: tuple[int, int]
) -> None:
    """Nothing sticks out; in dark everything that is drawn has the other colours; print shows every box."""
    window = {"viewport": {"width": size[0], "height": size[1]}, "color_scheme": "light"}
    with shown(chromium, page_of(tmp_path, found["plain"], found["deep"]), **window) as page:
        assert page.run("document.documentElement.scrollWidth <= innerWidth")
        ink = "document.querySelector('.heads canvas').toDataURL() + getComputedStyle(document.body).backgroundColor"
        light = page.run(ink)
        page.page.emulate_media(color_scheme="dark")
        page.page.wait_for_timeout(50)
        dark = page.run(ink)
        assert light != dark and dark.endswith("rgb(20, 24, 30)")
        page.page.emulate_media(media="print", color_scheme="light")
        assert page.run("getComputedStyle(document.querySelector('.strip')).position") == "static"
        inside = "b => b.getBoundingClientRect().right <= innerWidth + 1"
        assert page.run(f"[...document.querySelectorAll('.box')].every({inside})")
        assert len(page.page.pdf()) > 10_000


def test_what_a_prompt_holds_is_text(chromium: Any, found: dict[str, Inspection], tmp_path: Path) -> None:
    """Scripts, pictures, controls, letters from the right: shown, never run; so are a run's name and its tokens."""
    path = page_of(tmp_path, found["evil"])
    source = path.read_text()
    assert (
        source.count("<script") == 2
        and "<img" not in source
        and "http" not in re.sub(r"http://www.w3.org/\d+/svg", "", source)
    )
    with shown(chromium, path) as page:
        assert words(page, ".model > h2") == ["a & <b>"] and page.page.title() == "a & <b>"
        strip = "".join(words(page, ".strip bdi"))
        assert strip.startswith("⊢<script>alert('x')</script>·&·") and "␀" in strip and "\u202e" not in strip
        for _ in range(3):
            page.page.keyboard.press("ArrowRight")
        assert page.run("document.querySelectorAll('main script, main img').length") == 0
        assert page.run("document.querySelectorAll('.slopes path').length") == 4


def test_the_shortest_prompt_and_other_positions(chromium: Any, found: dict[str, Inspection], tmp_path: Path) -> None:
    with shown(chromium, page_of(tmp_path, found["start"], position=0)) as page:
        page.page.keyboard.press("ArrowRight")
        assert chosen(page) == [0] and "tells positions apart" in words(page, ".box")[1]
    with shown(chromium, page_of(tmp_path, found["relative"], position=2)) as page:
        assert page.run("document.querySelectorAll('.slopes path').length") == 4


def test_the_same_numbers_give_the_same_page(found: dict[str, Inspection], tmp_path: Path) -> None:
    first = page_of(tmp_path, found["plain"]).read_bytes()
    assert first == page_of(tmp_path, found["plain"]).read_bytes()
    assert not list(tmp_path.glob("*.tmp"))


@pytest.mark.parametrize(("length", "blocks", "most", "error"), [(64, 12, 5e6, 8e-6), (129, 1, 5e6, 4e-3)])
def test_weights_are_packed_as_the_page_says(length: int, blocks: int, most: float, error: float) -> None:
    """12 blocks, 12 heads, 64 tokens in less than 5 MB, of weights that cannot be packed any tighter than noise."""
    import base64
    import zlib

    from transformer.analysis.inspect_page import EXACT, _weights

    drawn = np.tril(np.random.default_rng(0).dirichlet([0.3] * length, (blocks, 12, length)))
    text = _weights(drawn, length <= EXACT)
    data = np.frombuffer(zlib.decompress(base64.b64decode(text)), np.uint8).astype(float)
    half = len(data) // 2
    found = (data[:half] * 256 + data[half:]) / 65535 if length <= EXACT else (data / 255) ** 2
    rows, columns = np.tril_indices(length)
    assert len(text) < most and np.abs(found - drawn[:, :, rows, columns].reshape(-1)).max() < error


def test_packing_keeps_seven_digits(found: dict[str, Inspection]) -> None:
    one = packed(found["plain"])
    assert np.array(one["entropy"]) == pytest.approx(found["plain"].said.entropy, rel=1e-6)
    assert np.array(one["norms_of"]["stream"]) == pytest.approx(found["plain"].stream_QT, rel=1e-6)
    assert jax.tree.leaves(one["rank"]) == found["plain"].said.next_rank.reshape(-1).tolist()
