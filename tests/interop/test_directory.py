"""A directory is there whole or not at all, and two writers never meet in one."""

import errno
import os
from pathlib import Path

import pytest

from transformer.errors import UserError
from transformer.interop.directory import whole


def test_what_was_made_is_there_at_the_end_alone_and_what_a_kill_left_is_gone(tmp_path: Path) -> None:
    (tmp_path / "out.unfinished" / "deep").mkdir(parents=True)
    (tmp_path / "out.unfinished" / "deep" / "left").write_text("by a kill")
    with whole("--to", tmp_path / "out") as fresh:
        assert not list(fresh.iterdir()) and not (tmp_path / "out").exists()
        (fresh / "file").write_text("whole")
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["file"]


def test_two_writers_of_one_directory(tmp_path: Path) -> None:
    with whole("--to", tmp_path / "out") as fresh:
        (fresh / "file").write_text("the first's")
        with pytest.raises(UserError, match="is being written by another process"), whole("--to", tmp_path / "out"):
            pytest.fail("the second was let in")
        assert (fresh / "file").read_text() == "the first's"
    assert (tmp_path / "out" / "file").read_text() == "the first's"


def test_what_a_link_points_at_is_not_emptied(tmp_path: Path) -> None:
    (tmp_path / "keep").mkdir()
    (tmp_path / "keep" / "precious").touch()
    (tmp_path / "out.unfinished").symlink_to(tmp_path / "keep")
    with pytest.raises(UserError, match=r"out.unfinished is a link to another place"), whole("--to", tmp_path / "out"):
        pytest.fail("it was let in")
    assert (tmp_path / "keep" / "precious").exists()


@pytest.mark.parametrize("there", ["", "a/b/"])
def test_nothing_is_left_of_a_failure_not_even_directories_above(tmp_path: Path, there: str) -> None:
    with pytest.raises(ZeroDivisionError), whole("--to", tmp_path / f"{there}out") as fresh:
        (fresh / "file").write_text("half")
        _ = 1 // 0
    assert not list(tmp_path.iterdir())


def test_the_directory_where_one_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with whole("--to", Path()) as fresh:
        (fresh / "file").write_text("whole")
    assert [str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*")] == ["here", "here/file"]


def test_a_full_disk_is_not_the_users_fault_and_a_forbidden_place_is(tmp_path: Path) -> None:
    def fails(number: int) -> None:
        with whole("--to", tmp_path / "out"):
            raise OSError(number, os.strerror(number))

    with pytest.raises(OSError, match="No space left"):
        fails(errno.ENOSPC)
    with pytest.raises(UserError, match="out cannot be written: Permission denied"):
        fails(errno.EACCES)
