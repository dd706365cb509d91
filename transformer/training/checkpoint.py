"""Checkpoints through Orbax, written in the background; the newest few and the best are kept.

Each holds three items, ``params``, ``optimizer`` (moments and counters) and ``progress`` (plain numbers
of the host: tokens so far, steps skipped), and DIGESTS, the sha256 of every file of theirs. Digests are
written before Orbax renames the finished directory, so a step is there whole and with them, or not at
all; they are checked before anything is read. Sampling and evaluating read ``params`` alone.

Of several processes each writes and reads the parts of its own devices, in a directory that all of them see; process 0
does the rest, and decides which checkpoint is read.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import jax
import orbax.checkpoint as ocp

from transformer.config import Experiment
from transformer.errors import UserError
from transformer.files import DIGESTS, saved_steps
from transformer.jsons import is_remote, write_whole
from transformer.parallel.hosts import agree, barrier, is_first
from transformer.training.metrics import METRICS, best_step, read
from transformer.training.state import State, abstract, init_params, init_state

UNFINISHED, DELETING, DAMAGED = ".orbax-checkpoint-tmp", ".deleting", ".damaged"
_MARKERS = ("_CHECKPOINT_METADATA", "commit_success.txt")  # Orbax's own, written after the digests; we read neither


class Damaged(Exception):
    """A checkpoint that is not as it was written."""


class Checkpoints:
    """The checkpoints of one run. ``save`` returns at once; ``close`` waits until all are on disk."""

    def __init__(self, directory: Path, keep: int):
        """Of what is in ``directory`` already only the debris of killed saves and deletions is removed."""
        self._directory, self._keep = _absolute(directory), keep
        if is_first():
            self._directory.mkdir(parents=True, exist_ok=True)
            for debris in self._debris():
                _remove(debris)
        barrier("checkpoints")
        self._saving: Path | None = None
        self._best: int | None = None
        self._writer = ocp.AsyncCheckpointer(
            ocp.CompositeCheckpointHandler(),
            async_options=ocp.options.AsyncOptions(post_finalization_callback=self._seal),
        )

    @property
    def steps(self) -> list[int]:
        return saved_steps(self._directory)

    def save(self, state: State, progress: dict[str, Any], best: int | None = None) -> None:
        """Begin to write the state after ``state.step`` steps. An earlier save that failed raises here.

        ``best`` is the step whose checkpoint is kept besides the newest ones.
        """
        params, optimizer = ocp.args.StandardSave(state.params), ocp.args.StandardSave(_optimizer(state))
        written_later = ocp.args.JsonSave(dict(progress))  # when the loop has counted on
        self._save(int(state.step), best, params=params, optimizer=optimizer, progress=written_later)

    def save_params(self, params: Any) -> None:
        """Begin to write weights alone, as of step 0: a run that starts here, and that nothing was trained in."""
        self._save(0, None, params=ocp.args.StandardSave(params))

    def _save(self, step: int, best: int | None, **items: Any) -> None:
        self.wait()
        self._saving, self._best = self._directory / str(step), best
        self._writer.save(self._saving, args=ocp.args.Composite(**items))

    def restore(self, experiment: Experiment, say: Callable[[str], None]) -> tuple[State, dict[str, Any]] | None:
        """The newest whole state, laid out for the mesh that is set; None where nothing was saved yet.

        Newer ones that are damaged are set aside, and ``say`` is told. RuntimeError where all are: those stay.
        """
        step = agree(lambda: self._newest_whole(say))
        if step is not None and not (self._directory / str(step) / "optimizer").is_dir():
            raise UserError(
                f"--workdir: {self._directory.parent} holds imported weights, and no training to go on with; start "
                f"another run from them with --config.train.init_from={self._directory.parent}"
            )
        return None if step is None else restore_state(self._directory / str(step), experiment)

    def _newest_whole(self, say: Callable[[str], None]) -> int | None:
        damaged: dict[Path, str] = {}
        for step in reversed(self.steps):
            path = self._directory / str(step)
            try:
                verify(path)
            except Damaged as damage:
                damaged[path] = str(damage)
                continue
            for bad, why in damaged.items():
                say(f"checkpoint {bad.name} is damaged: {why}; it is set aside as {_set_aside(bad)}")
            return step
        there = self._directory.iterdir() if self._directory.is_dir() else ()  # an empty one is none in a bucket
        aside = [path.name for path in there if path.name.endswith(DAMAGED)]
        names = [path.name for path in damaged] + sorted(aside)
        if names:  # the run does not begin again by itself, the next time neither
            raise RuntimeError(
                f"{self._directory}: none of the checkpoints {', '.join(names)} is whole; remove them to start again"
            )
        return None

    def wait(self) -> None:
        """Until everything is on disk; raises what went wrong on the way. Then older checkpoints go."""
        if self._saving is None:
            return
        try:
            self._writer.wait_until_finished()
        except Exception as error:
            raise OSError(f"{self._saving}: the checkpoint could not be written: {error}") from error
        finally:
            self._saving = None
        if not is_first():
            return
        for step in self.steps[: -self._keep]:
            if step != self._best:
                leaving = self._directory / str(step)
                if is_remote(leaving):
                    (leaving / DIGESTS).unlink()  # from now on it does not count
                else:
                    leaving = leaving.rename(self._directory / f"{step}{DELETING}")  # no half of it counts as a step
                _remove(leaving)

    def close(self) -> None:
        try:
            self.wait()
        finally:
            self._writer.close()

    def _seal(self) -> None:
        """Write the digests of a finished save's files. Orbax calls it before the rename that makes them a step."""
        assert self._saving is not None
        remote = is_remote(self._saving)  # a bucket renames nothing: there the digests alone make a step
        folder = self._saving if remote else self._saving.with_name(self._saving.name + UNFINISHED)
        digests = {name: _sha256(folder / name) for name in _files(folder)}
        if remote:
            write_whole(folder / DIGESTS, json.dumps(digests, indent=1).encode())
            return
        with open(folder / DIGESTS, "x", encoding="utf-8") as stream:
            json.dump(digests, stream, indent=1)
            stream.flush()
            os.fsync(stream.fileno())

    def _debris(self) -> Iterator[Path]:
        """What killed saves and deletions left."""
        for path in (
            list(self._directory.iterdir()) if self._directory.is_dir() else ()
        ):  # an empty one is none in a bucket
            unsealed = path.name.isdecimal() and not (path / DIGESTS).exists()
            if path.name.endswith((UNFINISHED, DELETING)) or (is_remote(path) and unsealed):
                yield path


def _absolute(path: Path) -> Path:
    """As Orbax wants it."""
    return path if is_remote(path) else path.absolute()


def _remove(directory: Path) -> None:
    """With all that is in it."""
    if is_remote(directory):
        cast(Any, directory).rmtree()
    else:
        shutil.rmtree(directory, ignore_errors=True)


def _set_aside(path: Path) -> Path:
    """Give a damaged checkpoint another name, so that it counts no more and is still there to be looked at."""
    aside = path.with_name(path.name + DAMAGED)
    if is_remote(path):  # a bucket has no directories that could be renamed
        for name in list(_files(path)):
            (aside / name).write_bytes((path / name).read_bytes())
        _remove(path)
        return aside
    shutil.rmtree(aside, ignore_errors=True)
    return path.rename(aside)


def verify(path: Path, item: str = "") -> None:
    """Raise Damaged where a file of the checkpoint (or of one ``item``) is missing, extra, or not as written."""
    try:
        digests = json.loads((path / DIGESTS).read_text(encoding="utf-8"))
        if not isinstance(digests, dict):
            raise Damaged(f"{DIGESTS} holds no digests")
        found = set(_files(path))
        for name in sorted(found ^ set(digests)):
            raise Damaged(f"{name} is {'missing' if name in digests else 'not a file of it'}")
        for name, digest in digests.items():
            if name.startswith(item) and _sha256(path / name) != digest:
                raise Damaged(f"{name} differs from what was written")
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise Damaged(f"{DIGESTS if isinstance(error, ValueError) else 'it'} cannot be read: {error}") from error


def restore_state(path: Path, experiment: Experiment) -> tuple[State, dict[str, Any]]:
    """State and progress of one checkpoint, which was verified, laid out for the mesh that is set."""
    like = abstract(lambda: init_state(experiment))
    found = _read(_absolute(path), params=like.params, optimizer=_optimizer(like))
    return State(params=found["params"], **found["optimizer"]), json.loads(_progress(path))


def restore_params(directory: Path, experiment: Experiment, which: str, alone: bool = False) -> tuple[Any, int]:
    """The weights of checkpoint ``which`` ("newest", "best", or a step) and its step. Reads nothing else of it.

    All processes read together, or with ``alone`` the first one for devices of its own. UserError where there is none,
    or where it is damaged.
    """
    step = _chosen(directory, which) if alone else agree(lambda: _chosen(directory, which))
    path = _absolute(directory) / str(step)
    return _read(path, alone, params=abstract(lambda: init_params(experiment)))["params"], step


def _chosen(directory: Path, which: str) -> int:
    steps = saved_steps(directory)
    if not steps:
        raise UserError(f"{directory}: holds no checkpoint yet")
    step: int | None = int(which) if which.isdecimal() else steps[-1]
    if which == "best":
        step = best_step([r for r in read(directory.parent / METRICS) if r["step"] in steps])
    if step not in steps or not (which.isdecimal() or which in ("newest", "best")):
        raise UserError(f"--checkpoint: {which!r} is not newest, best or one of the steps {steps}")
    path = _absolute(directory) / str(step)
    try:
        verify(path, "params/")
    except Damaged as damage:
        others = [s for s in steps if s != step]
        hint = f"; others are {others}" if others else ""
        raise UserError(f"--checkpoint: {path} is damaged: {damage}{hint}") from damage
    return int(path.name)


def _optimizer(state: State) -> dict[str, Any]:
    """All of a state but its weights."""
    return {name: value for name, value in state._asdict().items() if name != "params"}


def _read(path: Path, alone: bool = False, **like: Any) -> Any:
    """Items of a checkpoint in the shapes, dtypes and layouts of ``like``; UserError where they are others."""
    who = ocp.options.MultiprocessingOptions(active_processes={0} if alone else None)
    handler = ocp.CompositeCheckpointHandler(composite_options=ocp.CompositeOptions(multiprocessing_options=who))
    with ocp.Checkpointer(handler, multiprocessing_options=who) as reader:
        for name, wanted in like.items():
            _check_stored(f"{path}/{name}", ocp.StandardCheckpointHandler().metadata(path / name), wanted)
        return reader.restore(
            path, args=ocp.args.Composite(**{name: ocp.args.StandardRestore(x) for name, x in like.items()})
        )


def _check_stored(where: str, stored: Any, wanted: Any) -> None:
    """UserError where names, shapes or dtypes differ: Orbax would cast a dtype without a word."""

    def kinds(tree: Any) -> dict[str, str]:
        flat = jax.tree_util.tree_flatten_with_path(tree)[0]
        return {jax.tree_util.keystr(path): f"{leaf.dtype}{list(leaf.shape)}" for path, leaf in flat}

    found, asked = (
        kinds(ocp.utils.serialize_tree(stored.tree, keep_empty_nodes=False)),
        kinds(ocp.utils.serialize_tree(wanted, keep_empty_nodes=False)),
    )
    differ = [
        f"{name} is {found.get(name, 'absent')}, wanted {asked.get(name, 'absent')}"
        for name in sorted(found.keys() | asked.keys())
        if found.get(name) != asked.get(name)
    ]
    if differ:
        raise UserError(f"{where}: does not fit this configuration: {'; '.join(differ[:4])}")


def _progress(path: Path) -> str:
    return (path / "progress" / "metadata").read_text(encoding="utf-8")


def _files(folder: Path, above: str = "") -> Iterator[str]:
    """Names of all files that digests are kept of. (A bucket has no ``rglob``.)"""
    for path in sorted(folder.iterdir()):
        name = above + path.name
        if path.is_dir():
            yield from _files(path, f"{name}/")
        elif name not in (DIGESTS, *_MARKERS):
            yield name


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
