"""An experiment: one frozen tree of settings. Each part's own settings live with the part.

An experiment file is Python with ``get_config() -> Experiment``. From the command line any setting
is changed by its dotted name, ``--config.model.depth=12``; the machinery is `transformer.settings`.
"""

import dataclasses
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from transformer.data import prepare
from transformer.data.prepare import Data
from transformer.data.tasks.task import Task
from transformer.data.tokenizer import Bpe, Bytes, Symbols, TokenizerConfig, Unigram
from transformer.errors import UserError, did_you_mean
from transformer.model import config as model_config
from transformer.model.attention import kind
from transformer.model.config import Model
from transformer.model.moe import Moe
from transformer.model.positions import Rotary
from transformer.parallel import context, mesh, rules
from transformer.parallel.mesh import Mesh
from transformer.settings import check_types, digest, leaves, override, settings, tag_of
from transformer.training import config as train_config
from transformer.training.config import Train


@settings
class Experiment:
    """Everything that decides a run's result."""

    model: Model = Model()
    tokenizer: TokenizerConfig = Bpe()
    data: Data = Data()
    train: Train = Train()
    mesh: Mesh = Mesh()

    @property
    def vocab_size(self) -> int:
        """V: as the tokenizer will have it, to the entry (a trained tokenizer that differs is an error)."""
        if isinstance(self.tokenizer, Symbols):
            assert isinstance(self.data.source, Task)
            return len(self.data.source.symbols)
        return 257 if isinstance(self.tokenizer, Bytes) else self.tokenizer.vocab_size

    @property
    def program(self) -> "Experiment":
        """What the compiled training step depends on; everything else, and what it is given while it runs
        (`training.state.Dials`), at its default. Runs that have it in common share one executable."""
        names = ("steps", "batch", "accumulate", "warmup", "schedule", "optimizer", "weight_decay", "clip")
        train = Train(**{name: getattr(self.train, name) for name in (*names, "z_loss", "label_smoothing")})
        return Experiment(model=self.model, tokenizer=Bpe(vocab_size=self.vocab_size), train=train, mesh=self.mesh)

    @property
    def name(self) -> str:
        """The hash of every setting, which names the run."""
        return digest(self)


def load(path: str, changes: dict[str, str]) -> Experiment:
    """The experiment of a Python file with settings changed by dotted name, checked. UserError otherwise."""
    experiment = call_file(path, "get_config")
    if not isinstance(experiment, Experiment):
        raise UserError(f"{path}: get_config() returned {type(experiment).__name__}, not transformer.config.Experiment")
    check_types(experiment)
    experiment = changed(experiment, changes)
    check(experiment, given=changes)
    return experiment


def changed(experiment: Experiment, changes: Mapping[str, Any]) -> Experiment:
    """``experiment`` with settings changed by dotted name. A change from text to a synthetic task, or back, brings its
    tokenizer along where none is named: the task's symbols, or the usual one."""
    new = override(experiment, changes)
    is_task, source_named = isinstance(new.data.source, Task), {"data.source", "data.source.kind"} & set(changes)
    if (
        source_named
        and is_task != isinstance(new.tokenizer, Symbols)
        and not any(n.startswith("tokenizer") for n in changes)
    ):
        new = dataclasses.replace(new, tokenizer=Symbols() if is_task else Experiment().tokenizer)
    return new


# What an experiment's file may offer, and the command for it.
FILES = {"get_config": "python -m transformer train", "get_study": "python -m transformer study"}


def call_file(path: str, *functions: str) -> Any:
    """The result of the first of ``functions`` that the Python file at ``path`` has."""
    file = Path(path)
    if not file.is_file():
        folders = [folder for folder in (file.parent, Path("experiments")) if folder.is_dir()]
        beside = [str(p) for folder in folders for p in folder.glob("[!_]*.py") if p.name != "setup.py"]
        raise UserError(f"--config: there is no file {path}{did_you_mean(path, beside)}")
    if file.suffix != ".py":
        raise UserError(f"--config: {path} is not a Python file (its name must end in .py)")
    module = ModuleType(f"experiment_{file.stem}")
    module.__file__ = path
    try:
        # Not imported: that keeps bytecode, which a file of the same size written in the same second gets too.
        exec(compile(file.read_bytes(), path, "exec"), module.__dict__)
        for function in functions:
            if hasattr(module, function):
                return getattr(module, function)()
        other = next(
            (f"; it has {name}(), run it with {how}" for name, how in FILES.items() if hasattr(module, name)), ""
        )
        raise UserError(f"{path}: has no {' or '.join(f'{name}()' for name in functions)}{other}")
    except UserError:
        raise
    except (Exception, SystemExit) as error:  # whatever a user's file does wrong is theirs to read in one line
        raise UserError(f"{path}: {type(error).__name__}: {error}") from error


def check(experiment: Experiment, given: Collection[str] = ()) -> None:
    """Everything that can be known to be wrong before any work. One UserError, for the first fault."""
    e = experiment
    model_config.check(e.model)
    train_config.check(e.train)
    check_source(e)
    if isinstance(e.tokenizer, Unigram | Bpe) and e.tokenizer.vocab_size < 2:
        raise UserError(f"config.tokenizer.vocab_size: {e.tokenizer.vocab_size} is too small, set 300 or more")
    mesh.check(e.mesh)
    by_axis = mesh.sizes(e.mesh)
    rows = e.train.batch // e.train.accumulate
    of = f" / train.accumulate={e.train.accumulate}" if e.train.accumulate > 1 else ""
    rules.check_divides(f"config.train.batch={e.train.batch}{of}", (rows,), ("batch",), by_axis)
    context.check(e.model.context, e.mesh.context)
    if e.mesh.context > 1 and kind(e.model).recurrent is not None:
        raise UserError(
            f"config.mesh.context: {e.mesh.context} devices would each hold a part of a row, and linear attention "
            f"hands a state from position to position; set 1"
        )
    if e.mesh.expert > 1 and not isinstance(e.model.mlp, Moe):
        raise UserError(f"config.mesh.expert: {e.mesh.expert}, and the model has no experts to cut; use mesh.data")
    if any(size > 1 for size in by_axis.values()):
        from transformer.model.layers import declared_leaves  # JAX is only needed from here on
        from transformer.training.state import declarations

        for path, w in declared_leaves(declarations(e)).items():
            rules.check_divides(f"config.mesh: weight {path} of shape {w.shape}", w.shape, w.axes, by_axis)
    for name, seed in (("train.seed", e.train.seed), ("data.seed", e.data.seed)):
        if not 0 <= seed < 1 << 32:  # JAX drops the bits above, so two seeds would be one
            raise UserError(f"config.{name}: {seed} is not between 0 and {(1 << 32) - 1}")
    found = leaves(e)
    # What each setting has where nobody set it: the defaults of the tags that were chosen.
    usual = leaves(override(Experiment(), {name: tag for name, tag in found.items() if name.endswith(".kind")}))
    for name, (alive, reason) in INERT.items():
        if name in found and not alive(e) and (name in given or found[name] != usual.get(name, found[name])):
            raise UserError(f"config.{name}: {found[name]!r} has no effect here: {reason}; leave it out")


def _spread(mlp: Any) -> bool:
    """Whether a router has a choice."""
    return not isinstance(mlp, Moe) or mlp.top_k < mlp.experts


def check_source(e: Experiment) -> None:
    """UserError where text has no tokenizer of text, or a task's rows cannot be made or do not fit."""
    source, kind = e.data.source, tag_of(type(e.tokenizer))
    if not isinstance(source, Task):
        if isinstance(e.tokenizer, Symbols):
            raise UserError("config.tokenizer: symbols are for a synthetic task, and data.source is text; set bpe")
        prepare.check(e.data)
        return
    task = tag_of(type(source))
    if not isinstance(e.tokenizer, Symbols):
        raise UserError(f"config.tokenizer: {kind} has no effect: {task} has a vocabulary of its own; set symbols")
    if source.validation < 1:
        raise UserError(f"config.data.source.validation: {source.validation} rows are too few, set 1 or more")
    source.check()
    if source.length > e.model.context:
        raise UserError(
            f"config.model.context: {e.model.context} is too short for the rows of {task}, which have {source.length} "
            "positions"
        )


def is_text(e: Experiment) -> bool:
    return not isinstance(e.data.source, Task)


NO_TEXT = "a synthetic task has no text"
# Settings that do nothing in some configurations: when they are alive, and why they are not otherwise.
# (Most such settings cannot even be written: a window exists only on a kind that has one.)
INERT: dict[str, tuple[Callable[[Experiment], bool], str]] = {
    "data.text_field": (is_text, NO_TEXT),
    "data.piece_bytes": (is_text, NO_TEXT),
    "train.prompts": (is_text, "a synthetic task's model answers and continues nothing"),
    "data.weights": (lambda e: isinstance(e.data.source, str) and "," in e.data.source, "there is one source"),
    "data.validation": (
        lambda e: is_text(e) and e.data.source != "shakespeare",
        "what is held out is fixed: works of this corpus, rows of this task (data.source.validation)",
    ),
    "model.attention.projection.rope_width": (
        lambda e: isinstance(e.model.positions, Rotary),
        "only rotary positions have a part of their own",
    ),
    "model.mlp.balance": (lambda e: _spread(e.model.mlp), "every token goes through every expert"),
    "model.mlp.normalise": (
        lambda e: _spread(e.model.mlp) or (isinstance(e.model.mlp, Moe) and e.model.mlp.scores == "sigmoid"),
        "every token goes through every expert, and the softmax of all their scores sums to 1",
    ),
    "train.schedule.final": (lambda e: e.train.warmup < e.train.steps, "the warm-up takes all steps"),
    "train.schedule.decay": (lambda e: e.train.warmup < e.train.steps, "the warm-up takes all steps"),
}
