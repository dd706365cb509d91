"""A study: a question, a baseline, and arms that each change one thing while something is held equal.

An experiment file with ``get_study() -> Study`` is run by ``python -m transformer study``.
"""

import dataclasses
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from transformer import config
from transformer.analysis.cost import table_share
from transformer.config import Experiment
from transformer.data.tasks.task import Task
from transformer.errors import UserError, did_you_mean
from transformer.settings import check_types, leaves, override
from transformer.study import equal
from transformer.study.equal import Held, Quantity

BASELINE, AGAIN = "baseline", "baseline again"
SHIFT = 1_000_000  # from the seeds of the baseline to those of the baseline again
METRICS = {"bits_per_byte": "less", "loss": "less", "perplexity": "less", "accuracy": "more", "error": "less"}  # better
UNITS = {
    "bits_per_byte": "bits per byte",
    "loss": "nats per token",
    "perplexity": "of perplexity",
    "accuracy": "of accuracy",
    "error": "of wrong answers",
}
RESULTS, RESULT = "results.json", "result.json"
Metric = Literal["bits_per_byte", "loss", "perplexity", "accuracy", "error"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Study:
    """What is asked, and of whom.

    ``arms`` has for each name the settings that it changes, by dotted name as on the command line; ``grid`` has
    fields and values, every combination of which (but the baseline's own) is an arm. Each arm is trained once for
    each seed, which is its ``train.seed`` and its ``data.seed``. What an arm changes besides (its parameters, its
    FLOPs, ...) by more than 1 % must be held ``equal`` or listed in ``accept``. With ``learning_rates`` each arm
    uses the one of them that is best with ``tuning_seed``, which is none of the ``seeds``.
    """

    question: str
    baseline: Experiment
    arms: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    grid: Mapping[str, Sequence[Any]] = dataclasses.field(default_factory=dict)
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    metric: Metric = "bits_per_byte"  # on all that is held out, at the end; "error" is that of a synthetic task
    equal: Held = "steps"
    accept: tuple[Quantity, ...] = ()
    learning_rates: tuple[float, ...] = ()
    tuning_seed: int = 1000
    again: bool = False  # one arm more: the baseline under other seeds, which a sound study does not resolve
    lanes: int | None = None  # runs trained at once, a step of each in turn; none: as many as there are devices
    budget_hours: float | None = None  # arms that do not fit are dropped, the last ones first, and listed

    def changes(self) -> dict[str, dict[str, Any]]:
        """Every arm's changed settings, the arms of the grid after those with names of their own."""
        found = {name: dict(changed) for name, changed in self.arms.items()}
        for values in itertools.product(*self.grid.values()) if self.grid else ():
            changed = dict(zip(self.grid, values, strict=True))
            if override(self.baseline, changed) != self.baseline:
                name = ", ".join(f"{field.rpartition('.')[2]}={value}" for field, value in changed.items())
                if name in found:
                    raise UserError(f"study: two arms are called {name!r}")
                found[name] = changed
        return found | ({AGAIN: {}} if self.again else {})


def folder(name: str) -> str:
    """An arm's name as a directory's."""
    found = re.sub(r"[^\w.=-]+", "_", name)
    return found if found.strip(".") else "_"  # never the directory above


@dataclasses.dataclass(frozen=True)
class Arm:
    """One arm as it will be trained, but for the seed: what it changes, what was solved for, what differs besides."""

    name: str
    changes: dict[str, Any]
    experiment: Experiment
    solved: dict[str, Any]  # settings that holding something equal has changed, with their values
    quantities: dict[Quantity, float]

    @property
    def folder(self) -> str:
        return folder(self.name)

    def seeded(self, seed: int, learning_rate: float | None = None) -> Experiment:
        """The experiment of one run."""
        seed = seed + SHIFT if self.name == AGAIN else seed
        changes: dict[str, Any] = {"train.seed": seed, "data.seed": seed}
        if learning_rate is not None:
            changes["train.learning_rate"] = learning_rate
        return override(self.experiment, changes)


def load(path: str, changes: Mapping[str, str], **fields: Any) -> Study:
    """The study of a Python file, checked; ``changes`` are made to its baseline, and with it to all arms."""
    study = config.call_file(path, "get_study")
    if not isinstance(study, Study):
        raise UserError(f"{path}: get_study() returned {type(study).__name__}, not transformer.study.study.Study")
    return _changed(study, changes, fields)


def repeat(path: str, changes: Mapping[str, str], **fields: Any) -> Study:
    """A study of one configuration alone: that of an experiment's file, or the baseline of a study's."""
    found = config.call_file(path, "get_study", "get_config")
    baseline = found.baseline if isinstance(found, Study) else found
    if not isinstance(baseline, Experiment):
        raise UserError(f"{path}: gave {type(found).__name__}, neither a Study nor an Experiment")
    is_task = isinstance(override(baseline, changes).data.source, Task)
    metric: Metric = "error" if is_task else "bits_per_byte"
    study = Study(question="How much do seeds alone change the result?", baseline=baseline, metric=metric)
    return _changed(study, changes, fields)


def check_fields(study: Study) -> None:
    """UserError for the first field of a file's study that is of another type than it must be."""
    of = {
        "question": (isinstance(study.question, str), "a text"),
        "baseline": (isinstance(study.baseline, Experiment), "a transformer.config.Experiment"),
        "arms": (_maps(study.arms, Mapping), "names with what each changes: {'deep': {'model.depth': 8}}"),
        "grid": (_maps(study.grid, (tuple, list)), "settings with their values: {'model.depth': (1, 8)}"),
        "seeds": (_all(study.seeds, int), "whole numbers: (0, 1, 2)"),
        "accept": (_all(study.accept, str), "names of quantities: ('parameters',)"),
        "learning_rates": (_all(study.learning_rates, int, float), "numbers: (1e-3, 3e-3)"),
        "tuning_seed": (type(study.tuning_seed) is int, "a whole number"),
        "again": (type(study.again) is bool, "True or False"),
        "lanes": (study.lanes is None or type(study.lanes) is int, "a whole number, or None"),
        "budget_hours": (study.budget_hours is None or type(study.budget_hours) in (int, float), "a number, or None"),
    }
    for name, (good, wanted) in of.items():
        if not good:
            raise UserError(f"study.{name}: {getattr(study, name)!r} is not {wanted}")


def _all(found: Any, *types: type) -> bool:
    return isinstance(found, tuple | list) and all(type(x) in types for x in found)


def _maps(found: Any, types: Any) -> bool:
    return isinstance(found, Mapping) and all(isinstance(k, str) and isinstance(v, types) for k, v in found.items())


def _changed(study: Study, changes: Mapping[str, str], fields: Mapping[str, Any]) -> Study:
    check_fields(study)
    check_types(study.baseline)
    study = dataclasses.replace(study, baseline=config.changed(study.baseline, changes), **fields)
    config.check(study.baseline, given=changes)
    check(study)
    return study


def check(study: Study) -> None:
    """UserError for what can be known to be wrong before anything is built."""
    fields: list[tuple[str, str, Any]] = [("metric", study.metric, METRICS), ("equal", study.equal, equal.HELD)]
    fields += [("accept", value, equal.QUANTITIES) for value in study.accept]
    for name, value, known in fields:
        if value not in known:
            raise UserError(f"study.{name}: {value!r} is not valid{did_you_mean(value, known)}")
    text_alone, task_alone = ("bits_per_byte", "bytes"), ("error",)
    for name, value in (("metric", study.metric), ("equal", study.equal)):
        if value in text_alone and not config.is_text(study.baseline):
            raise UserError(f"study.{name}: a synthetic task has no bytes of text; {value} is not for it, error is")
        if value in task_alone and config.is_text(study.baseline):
            raise UserError(f"study.{name}: a text has no wrong answers; error is for synthetic tasks, take accuracy")
    if not study.seeds or len(set(study.seeds)) < len(study.seeds):
        raise UserError(f"study.seeds: {study.seeds} are not one or more different seeds")
    if study.learning_rates and study.tuning_seed in study.seeds:
        raise UserError(f"study.tuning_seed: {study.tuning_seed} is also one of the seeds that the verdict rests on")
    if study.lanes is not None and study.lanes < 1:
        raise UserError(f"study.lanes: {study.lanes} is not a number of runs, set 1 or more")
    folders: dict[str, str] = {}
    for name, changed in [(BASELINE, {}), *study.changes().items()]:
        place = folder(name).lower()  # some file systems know one case
        if place in folders:
            raise UserError(f"study.arms: {name!r} and {folders[place]!r} would share the directory {place!r}")
        folders[place] = name
        for field in changed:
            if field in ("train.seed", "data.seed") or (field == "train.learning_rate" and study.learning_rates):
                raise UserError(f"study.arms: {name!r} changes {field}, which the study itself sets")


def resolve(study: Study, bytes_per_row: Callable[[Experiment], float]) -> list[Arm]:
    """The baseline and the arms, with what is held equal solved for. ``bytes_per_row`` is of source text.

    UserError where an arm cannot be built, cannot be made equal to 1 %, or changes more than it declares.
    """

    def quantities(experiment: Experiment) -> dict[Quantity, float]:
        return equal.quantities(experiment, bytes_per_row)

    base = Arm(BASELINE, {}, study.baseline, {}, quantities(study.baseline))
    arms = [base]
    for name, changed in study.changes().items():
        try:
            experiment = config.changed(study.baseline, changed)
            config.check(experiment, given=changed)
            solved = equal.solve(study.equal, experiment, base.quantities, set(changed), bytes_per_row)
            config.check(solved, given=changed)
        except UserError as error:
            raise UserError(f"study.arms: {name!r}: {error}") from error
        old, new = leaves(experiment), leaves(solved)
        arm = Arm(name, changed, solved, {k: v for k, v in new.items() if old.get(k) != v}, quantities(solved))
        undeclared = [
            f"{q} ({base.quantities[q]:,.0f} to {value:,.0f})"
            for q, value in arm.quantities.items()
            if q not in study.accept and abs(value / base.quantities[q] - 1) > equal.TOLERANCE
        ]
        if undeclared:
            raise UserError(
                f"study.arms: {name!r} also changes {', '.join(undeclared)}; hold one equal, or list them in accept"
            )
        arms.append(arm)
    return arms


def to_json(study: Study, arms: Sequence[Arm]) -> dict[str, Any]:
    """What study.json says: the question and what every arm is, before anything was run."""
    return {
        "question": study.question,
        "metric": study.metric,
        "better": METRICS[study.metric],
        "seeds": list(study.seeds),
        "equal": study.equal,
        "accept": list(study.accept),
        "learning_rates": list(study.learning_rates),
        "arms": [
            {
                "name": arm.name,
                "changes": arm.changes,
                "grid": {field: leaves(arm.experiment).get(field) for field in study.grid},
                "solved": arm.solved,
                "quantities": arm.quantities,
                "tables": table_share(arm.experiment),
            }
            for arm in arms
        ],
    }
