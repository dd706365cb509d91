"""An experiment: one frozen tree of settings. Each part's own settings live with the part.

An experiment file is Python with ``get_config() -> Experiment``. From the command line any setting
is changed by its dotted name, ``--config.model.depth=12``; the machinery is `transformer.settings`.
"""

from collections.abc import Callable, Collection
from pathlib import Path
from types import ModuleType
from typing import Any

from transformer.data.prepare import Data
from transformer.data.tokenizer import Bpe, Bytes, Imported, Unigram
from transformer.errors import UserError, did_you_mean
from transformer.model import config as model_config
from transformer.model.attention import kind
from transformer.model.config import Model
from transformer.model.moe import Moe
from transformer.model.positions import Rotary
from transformer.parallel import context, mesh, rules
from transformer.parallel.mesh import Mesh
from transformer.settings import check_types, digest, leaves, override, settings
from transformer.training import config as train_config
from transformer.training.config import Train


@settings
class Experiment:
    """Everything that decides a run's result."""

    model: Model = Model()
    tokenizer: Bytes | Unigram | Bpe | Imported = Bpe()
    data: Data = Data()
    train: Train = Train()
    mesh: Mesh = Mesh()

    @property
    def vocab_size(self) -> int:
        """V: as the tokenizer will have it, to the entry (a trained tokenizer that differs is an error)."""
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
    experiment = override(experiment, changes)
    check(experiment, given=changes)
    return experiment


# What an experiment's file may offer, and the command for it.
FILES = {"get_config": "python -m transformer train", "get_study": "python -m transformer study"}


def call_file(path: str, *functions: str) -> Any:
    """The result of the first of ``functions`` that the Python file at ``path`` has."""
    file = Path(path)
    if not file.is_file():
        beside = [str(p) for p in file.parent.glob("*.py")] if file.parent.is_dir() else []
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
    if not isinstance(e.tokenizer, Bytes) and e.tokenizer.vocab_size < 2:
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


# Settings that do nothing in some configurations: when they are alive, and why they are not otherwise.
# (Most such settings cannot even be written: a window exists only on a kind that has one.)
INERT: dict[str, tuple[Callable[[Experiment], bool], str]] = {
    "data.weights": (lambda e: "," in e.data.source, "there is one source"),
    "data.validation": (
        lambda e: e.data.source != "shakespeare",
        "this corpus has a fixed list of held-out works",
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
