"""The page of kinds of attention is what the code says now, and each kind says what it must."""

from tests.attention_page import AXES, PAGE, idea, page, rows
from transformer.model.attention import KINDS, Attention
from transformer.model.positions import POSITIONS
from transformer.settings import hints, members


def test_the_page_is_what_the_tables_give() -> None:
    """Made anew by `python -m tests.attention_page`."""
    assert PAGE.read_text(encoding="utf-8") == page()


def test_every_kind_has_a_row_with_an_idea_and_an_equation() -> None:
    found = {axis: [row.cls for row in rows(axis)] for axis in AXES}
    assert set(found["model.attention.projection"]) >= set(KINDS)
    assert set(found["model.positions"]) > set(POSITIONS)
    for cls in (cls for kinds in found.values() for cls in kinds):
        words, equation, _ = idea(cls)
        assert len(words) > 10 and "arXiv" not in words, cls
        assert equation, f"{cls.__name__}: its docstring, or its file's, has no equation in double backticks"


def test_the_table_gives_the_projection_its_type() -> None:
    assert set(members(hints(Attention)["projection"]).values()) == set(KINDS)
