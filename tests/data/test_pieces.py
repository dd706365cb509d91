"""Cutting documents: by bytes alone, near fixed offsets, at natural places."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from transformer.data.pieces import cut

LETTERS = "abcdef \n\u00e9\u2581\U0001f600"


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    length=st.integers(0, 500),
    size=st.sampled_from([64, 65, 128]),
    data=st.data(),
)
def test_pieces_join_to_the_document_however_it_arrives(seed: int, length: int, size: int, data: st.DataObject) -> None:
    content = "".join(random.Random(seed).choices(LETTERS, k=length)).encode()
    chunk = data.draw(st.sampled_from([1, 2, 3, 5, 7, 11, 60, 64, 67, 100, 400]))
    pieces = list(cut([content], size))
    chunked = list(cut((content[i : i + chunk] for i in range(0, len(content), chunk)), size))
    assert pieces == chunked
    assert b"".join(piece for piece, _ in pieces) == content
    assert [last for _, last in pieces] == [False] * (len(pieces) - 1) + [True] * bool(content)
    start = 0
    for i, (piece, _) in enumerate(pieces):
        piece.decode()
        assert piece and i * size <= start < i * size + size // 8 + 4
        start += len(piece)


def test_cuts_go_to_a_newline_else_before_a_space_else_to_a_letter() -> None:
    def first(text: str) -> int:
        return len(next(cut([text.encode()], 64))[0])

    assert first("a" * 66 + " b\n" + "c" * 99) == 69, "just after the newline"
    assert first("a" * 63 + "\n" + "b" * 99) == 64, "a newline right before needs no move"
    assert first("a" * 66 + " b" + "c" * 99) == 66, "before the space"
    assert first("a" * 99 + " \n" + "c" * 99) == 64, "nothing near: where it is due"
    assert first("a" * 63 + "\U0001f600" + "c" * 99) == 67, "never inside a letter"


def test_later_text_does_not_move_earlier_cuts() -> None:
    text = ("some words here\n" * 40).encode()
    before, after = list(cut([text], 64)), list(cut([text + b"more " * 50], 64))
    assert after[: len(before) - 1] == before[:-1]
