"""The exact code of this checkout, uncommitted changes included, as one archive."""

import gzip
import hashlib
import io
import subprocess
import tarfile
from pathlib import Path

from launch.errors import UserError

ROOT = Path(__file__).resolve().parents[1]


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
    packed = io.BytesIO()
    with gzip.GzipFile(fileobj=packed, mode="wb", mtime=0) as zipped, tarfile.open(fileobj=zipped, mode="w") as tar:
        for name in files(root):
            content = (root / name).read_bytes()
            entry = tarfile.TarInfo(str(name))
            entry.size, entry.mode = len(content), (root / name).stat().st_mode & 0o777
            tar.addfile(entry, io.BytesIO(content))
    return packed.getvalue(), hashlib.sha256(packed.getvalue()).hexdigest()
