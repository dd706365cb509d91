"""The exact code of a checkout as an archive, and back."""

import hashlib
import io
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from launch import code, worker
from launch.code import archive, files, unpack, verify
from launch.errors import UserError


@pytest.fixture
def root(tmp_path):
    here = tmp_path / "checkout"
    (here / "a b").mkdir(parents=True)
    (here / ".gitignore").write_text("/runs/\n")
    (here / "kept.py").write_text("committed")
    (here / "a b" / "run me\n.sh").write_bytes(b"\xff\0")
    (here / "a b" / "run me\n.sh").chmod(0o755)
    (here / "gone.py").write_text("")
    git = ["git", "-c", "user.name=n", "-c", "user.email=e"]
    subprocess.run([*git, "init", "-q"], cwd=here, check=True)
    subprocess.run([*git, "add", "."], cwd=here, check=True)
    subprocess.run([*git, "commit", "-qm", "m"], cwd=here, check=True)
    (here / "gone.py").unlink()
    (here / "kept.py").write_text("changed, not committed")
    (here / "new.py").write_text("not tracked yet")
    (here / "runs").mkdir()
    (here / "runs" / "big").write_text("ignored")
    return here


def test_what_git_would_have_is_packed_as_it_is_now(root, tmp_path):
    packed, digest = archive(root)
    assert archive(root) == (packed, digest) and digest == hashlib.sha256(packed).hexdigest()
    assert packed[4:8] == bytes(4), "the time of packing is in it"
    with tarfile.open(fileobj=io.BytesIO(packed)) as tar:  # the independent reader
        content = {entry.name: (tar.extractfile(entry).read(), entry.mode & 0o700) for entry in tar}
    assert content == {
        ".gitignore": (b"/runs/\n", 0o600),
        "a b/run me\n.sh": (b"\xff\0", 0o700),
        "kept.py": (b"changed, not committed", 0o600),
        "new.py": (b"not tracked yet", 0o600),
    }
    unpack(packed, tmp_path / "copies" / "one")
    for name in files(root):
        copy = tmp_path / "copies" / "one" / name
        assert copy.read_bytes() == (root / name).read_bytes() and copy.stat().st_mode == (root / name).stat().st_mode
    assert [entry.name for entry in (tmp_path / "copies").iterdir()] == ["one"], "something was left behind"


def test_another_content_is_another_archive(root):
    before = archive(root)[1]
    (root / "new.py").write_text("not tracked yet!")
    assert archive(root)[1] != before


@pytest.mark.parametrize("harm", ["changed", "removed", "a directory"])
def test_a_copy_that_was_changed_is_refused_and_named(root, tmp_path, harm):
    packed, _ = archive(root)
    copy = tmp_path / "copy"
    unpack(packed, copy)
    (copy / "more").write_text("what the job writes beside it does not matter")
    unpack(packed, copy)
    verify(packed, copy)
    if harm == "changed":
        (copy / "kept.py").write_text("changed, not committee")
    else:
        (copy / "kept.py").unlink()
    if harm == "a directory":
        (copy / "kept.py").mkdir()
    for check in (unpack, verify):
        with pytest.raises(UserError, match=r"kept.py: is not as it was launched"):
            check(packed, copy)


def test_what_is_no_checkout_is_refused(tmp_path):
    with pytest.raises(UserError, match="no git checkout"):
        archive(tmp_path)


def test_what_is_no_code_is_refused_and_named(root, monkeypatch):
    monkeypatch.setattr(code, "LIMIT", 3000)
    (root / "weights.bin").write_bytes(bytes(4000))
    with pytest.raises(UserError, match=r"weights\.bin"):
        archive(root)


@pytest.mark.parametrize(("digest", "told"), [("0" * 64, "damaged"), (None, "new")])
def test_code_that_arrives_damaged_is_not_run(tmp_path: Path, digest: str | None, told: str) -> None:
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "code.tar.gz").write_bytes(b"code")
    digest = digest or hashlib.sha256(b"code").hexdigest()
    command = [sys.executable, str(worker.__file__), "begin", str(tmp_path), "id", digest]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert told in ended.stdout + ended.stderr and (ended.returncode == 0) == (told == "new")
