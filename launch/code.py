"""The exact code of this checkout, uncommitted changes included, as one archive."""

import gzip
import hashlib
import io
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

from launch.errors import UserError

ROOT = Path(__file__).resolve().parents[1]
LIMIT = 64_000_000  # bytes; more than that is not code


def files(root: Path = ROOT) -> list[Path]:
    """What git tracks or would track (ignored files are not), relative to ``root``, sorted."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        listed = subprocess.run(command, cwd=root, capture_output=True, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        raise UserError(f"{root}: no git checkout, so which files are its code is not known") from None
    names = sorted(set(listed.decode(errors="surrogateescape").split("\0")) - {""})
    return [Path(name) for name in names if (root / name).is_file()]


def archive(root: Path = ROOT) -> tuple[bytes, str]:
    """A tar.gz of the code, and its SHA-256. The same files give the same bytes."""
    names = files(root)
    sizes = {name: (root / name).stat().st_size for name in names}
    if sum(sizes.values()) > LIMIT:
        largest = max(sizes, key=lambda name: sizes[name])
        raise UserError(
            f"{root}: {sum(sizes.values()) / 1e6:.0f} MB are no code, {largest} for one; name what is not in .gitignore"
        )
    packed = io.BytesIO()
    with gzip.GzipFile(fileobj=packed, mode="wb", mtime=0) as zipped, tarfile.open(fileobj=zipped, mode="w") as tar:
        for name in names:
            content = (root / name).read_bytes()
            entry = tarfile.TarInfo(str(name))
            entry.size, entry.mode = len(content), (root / name).stat().st_mode & 0o777
            tar.addfile(entry, io.BytesIO(content))
    return packed.getvalue(), hashlib.sha256(packed.getvalue()).hexdigest()


def unpack(packed: bytes, directory: Path) -> None:
    """Make ``directory`` of an archive, whole or not at all. UserError where it is there with other content."""
    if directory.exists():
        return verify(packed, directory)
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".unpacking-", dir=directory.parent) as unfinished:
        made = Path(unfinished, "code")
        for name, mode, content in _entries(packed):
            file = made / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content)
            file.chmod(mode)
        try:
            made.rename(directory)
        except OSError:  # another launch was faster
            verify(packed, directory)


def verify(packed: bytes, directory: Path) -> None:
    """UserError where a file of the archive is not in ``directory`` as it was packed; other files do not matter."""
    for name, _, content in _entries(packed):
        file = directory / name
        if not file.is_file() or file.read_bytes() != content:
            raise UserError(f"{file}: is not as it was launched; remove {directory} and launch again")


def _entries(packed: bytes) -> Iterator[tuple[str, int, bytes]]:
    with tarfile.open(fileobj=io.BytesIO(packed)) as tar:
        for entry in tar:
            content = tar.extractfile(entry)
            assert content is not None, "archive() packs plain files only"
            yield entry.name, entry.mode, content.read()
