"""Run a study: one run after another, each an ordinary run's directory; then compare.

    study.json                the question and the arms
    arms/NAME/seed_K/         a run, and result.json once it is finished and measured
    tuning/NAME/lr_R/seed_K/  the runs that the learning rates were chosen by
    results.json              every arm's metric, and its place beside the baseline; nothing in it depends on the clock
    report.html               the same as a page, with figures/ and *.csv for papers; see report.py
    study.log                 what the runs said

Several processes of one job train and measure every run together; the first of them reads and writes the files.

A study that was stopped, at any moment and in any way, goes on with the same command: what has its result is
not run again, and a run that was begun goes on from its checkpoint. So its arms may also be run one by one, each by a
process of its own, at the same time: they share the directory, and the study compares what it finds there.
"""

import contextlib
import dataclasses
import json
import math
import statistics as means
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

from transformer import run as runs
from transformer.analysis.examples import show
from transformer.analysis.validation import validator
from transformer.config import Experiment
from transformer.data.loader import Loader
from transformer.data.prepare import Prepared, prepare
from transformer.data.tasks.task import Task
from transformer.errors import UserError, did_you_mean
from transformer.files import CONFIG, STUDY, alone, in_turn
from transformer.jsons import read_object, write_json
from transformer.parallel import hosts
from transformer.parallel.mesh import Mesh, all_devices, make_mesh, sizes
from transformer.study.price import Price, affordable, price
from transformer.study.report import write_report
from transformer.study.statistics import Comparison, compare
from transformer.study.study import METRICS, RESULT, RESULTS, UNITS, Arm, Study, resolve, to_json
from transformer.training.lanes import train_together
from transformer.training.loop import check_source

Say = Callable[[str], None]
LOG = "study.log"


class Failed(Exception):
    """Some runs of a study ended with an error that another try may not meet; all that does not need them is done.

    ``results`` is what results.json holds; None where it was a run that a learning rate is chosen by.
    """

    def __init__(self, message: str, results: dict[str, Any] | None):
        super().__init__(message)
        self.results = results


@dataclasses.dataclass
class Runner:
    """A study being run in ``workdir``."""

    study: Study
    workdir: Path
    cache: Path
    argv: list[str]
    say: Say
    arm: str | None = None  # the only one to run; then nothing is compared

    def __post_init__(self) -> None:
        self.texts: dict[Any, Prepared] = {}
        self.rows: dict[Any, float] = {}
        self.ended: dict[Path, Exception | None] = {}  # what the training of each run ended with
        self.errors: list[str] = []

    def run(self) -> dict[str, Any]:
        """Everything that is missing, in an order that fills seed after seed; returns what results.json holds.

        Raises UserError for what is wrong with the study, Stop where a signal came, Failed at the end where runs
        ended with an error.
        """
        all_devices()  # where those asked for are not there, before anything is written
        planned = resolve(self.study, self.bytes_per_row)
        self.check_arm(planned)
        for arm in planned:
            if arm.experiment.train.init_from is not None:
                check_source(arm.experiment, self.text_of(arm.experiment).tokenizer)
        hosts.agree(self.on_disk)  # before anything is made
        with contextlib.ExitStack() as locks:
            if hosts.is_first():
                runs.make(self.workdir)
                locks.enter_context(alone(self.workdir, shared=self.arm is not None))
            try:
                with (
                    in_turn(self.workdir / LOG)
                    if hosts.is_first() and self.arm is not None
                    else contextlib.nullcontext()
                ):
                    arms = [arm for arm in self.claim(planned) if self.arm in (None, arm.name)]
            except UserError:
                with contextlib.suppress(OSError):  # it holds something
                    self.workdir.rmdir()
                raise
            if hosts.is_first() and self.arm is not None:  # others may run other arms
                part = self.workdir / "arms" / arms[0].folder
                runs.make(part)
                locks.enter_context(alone(part))
            rates = {arm.name: self.tune(arm) for arm in arms} if self.study.learning_rates else {}
            wanted = [(seed, arm) for seed in self.study.seeds for arm in arms]
            found: dict[str, dict[int, dict[str, Any]]] = {arm.name: {} for arm in arms}
            missing = []
            for seed, arm in wanted:
                experiment = arm.seeded(seed, rates[arm.name]["chosen"] if rates else None)
                directory = self.place(experiment, self.workdir / "arms" / arm.folder / f"seed_{seed}")
                if result := self.known(experiment, directory):
                    found[arm.name][seed] = result
                else:
                    missing.append((seed, arm, experiment, directory))
            results, begun = self.write(arms, found, rates), time.monotonic()
            for number, (seed, arm, experiment, directory) in enumerate(missing):
                if number % self.lanes == 0:
                    group = missing[number : number + self.lanes]
                    self.train([(e, place) for _, _, e, place in group])
                result = self.one(experiment, directory, seed == self.study.seeds[0])
                if result is None:
                    continue
                found[arm.name][seed] = result
                results = self.write(arms, found, rates)  # so that the page can be looked at before the end
                left = (time.monotonic() - begun) / (number + 1) * (len(missing) - number - 1) / 60
                value = result.get("failed") or shown(result.get(self.study.metric))
                done = f"[{len(wanted) - len(missing) + number + 1}/{len(wanted)}] {arm.name}, seed {seed}: {value}"
                self.say(f"{done}; about {left:.0f} min left; so far: {verdicts(results)}")
            if missing:
                rate = len(missing) / (time.monotonic() - begun) * 3600
                self.say(f"{len(missing)} runs, {self.lanes} at once: {rate:,.0f} an hour")
            if any(found.values()) and hosts.is_first() and self.arm is None:
                write_report(self.workdir)
        self.raise_failed(results)
        return results

    def check_arm(self, planned: Sequence[Arm]) -> None:
        """UserError for a single arm that there is not, or that a budget for all of them may drop."""
        names = [arm.name for arm in planned]
        if self.arm is not None and self.arm not in names:
            raise UserError(f"--arm: {self.arm!r} is no arm of this study{did_you_mean(self.arm, names)}")
        if self.arm is not None and self.study.budget_hours is not None:
            raise UserError("--arm: what fits into a budget is known of all arms together; set --budget_hours=inf")

    def raise_failed(self, results: dict[str, Any] | None = None) -> None:
        """Failed, naming each run that ended with an error so far."""
        if self.errors:
            raise Failed(f"{self.workdir}: {'; '.join(self.errors)}; the same command tries these again", results)

    def claim(self, planned: Sequence[Arm]) -> list[Arm]:
        """Write study.json; the arms that fit into the budget. UserError where the directory holds something else."""
        known, old = hosts.agree(self.on_disk)
        new = json.loads(json.dumps(to_json(self.study, planned)))
        changed = [name for name in new if old.get(name) != new[name]]
        if known and changed and self.arm is not None:
            raise UserError(
                f"--arm: {self.workdir} holds a study of other {', '.join(changed)}; `study` without --arm changes that"
            )
        if known and changed:
            self.say(f"{self.workdir}: the study has changed in {', '.join(changed)}; finished runs of before are kept")
        arms = list(planned)
        if self.study.budget_hours is not None:  # priced once: what is dropped does not change when it goes on
            again = old.get("hours") and not changed and old.get("budget_hours") == self.study.budget_hours
            hours = old["hours"] if again else self.price(planned)
            hours = hosts.agree(lambda: hours)  # the clock of one of them decides
            arms = affordable(self.study, planned, hours)
            new |= {"budget_hours": self.study.budget_hours, "hours": hours}
            new["dropped"] = [arm.name for arm in planned[len(arms) :]]
            self.say(f"about {sum(hours[arm.name] for arm in arms):.2f} hours of {self.study.budget_hours:g}")
            if new["dropped"]:
                self.say(f"dropped, as they do not fit: {', '.join(new['dropped'])}")
        if self.arm is None or old != new:  # other arms' processes may be reading it
            with runs.writing(self.workdir):
                write_json(self.workdir / STUDY, new)
        return arms

    def on_disk(self) -> tuple[bool, dict[str, Any]]:
        """Whether the directory holds a study, and what its study.json says. UserError where it holds other files."""
        known = (self.workdir / STUDY).is_file()
        begun = (LOG, f"{STUDY}.tmp")  # what another arm's process may be writing
        if not known and self.workdir.is_dir() and any(p.name not in begun for p in self.workdir.iterdir()):
            raise UserError(f"--workdir: {self.workdir} is not empty and holds no study; choose another directory")
        return known, read_object(self.workdir / STUDY) if known else {}

    def price(self, arms: Sequence[Arm]) -> Price:
        """Hours here, by arm."""
        self.say("timing some steps of every arm")
        return price(self.study, arms, self.validation_tokens)

    def validation_tokens(self, experiment: Experiment) -> int:
        """Of what is measured on at the end; half of each window of text is read again, and no row of a task."""
        if isinstance(experiment.data.source, Task):
            return experiment.data.source.validation * experiment.model.context // 2
        return sum(store.tokens for store in self.text_of(experiment).validation)

    def text_of(self, experiment: Experiment) -> Prepared:
        key = (dataclasses.replace(experiment.data, seed=0), experiment.tokenizer)
        if key not in self.texts:
            self.texts[key] = prepare(experiment.data, experiment.tokenizer, self.cache, self.say)
        return self.texts[key]

    def bytes_per_row(self, experiment: Experiment) -> float:
        """Of source text, in a training row, on average."""
        if isinstance(experiment.data.source, Task):
            return experiment.data.source.length  # it has no text; a symbol counts as a byte
        data, context = dataclasses.replace(experiment.data, seed=0), experiment.model.context
        key = (data, experiment.tokenizer, context)
        if key not in self.rows:
            parts = Loader(self.text_of(experiment).train, data.weights, 0, 1, context).accounting()
            self.rows[key] = sum(part["share"] * part["source_bytes"] / part["rows"] for part in parts)
        return self.rows[key]

    def tune(self, arm: Arm) -> dict[str, Any]:
        """The learning rate that is best for an arm with the tuning seed, and what was found at each."""
        seed, found = self.study.tuning_seed, dict[float, float | None]()
        runs_of = []
        for rate in self.study.learning_rates:
            experiment, parent = arm.seeded(seed, rate), self.workdir / "tuning" / arm.folder / f"lr_{rate:g}"
            directory = self.place(experiment, parent / f"seed_{seed}")
            runs_of.append((rate, experiment, directory, self.known(experiment, directory)))
        missing = [(experiment, directory) for _, experiment, directory, known in runs_of if not known]
        for start in range(0, len(missing), self.lanes):
            self.train(missing[start : start + self.lanes])
        for rate, experiment, directory, known in runs_of:
            result = known or self.one(experiment, directory)
            if result is None:
                continue
            found[rate] = result.get(self.study.metric)
            if not known:
                self.say(f"tuning {arm.name}: learning rate {rate:g} gives {shown(found[rate])}")
        self.raise_failed()  # a choice among the others would be another choice than the next try's
        finite = {rate: value for rate, value in found.items() if value is not None}
        if not finite:
            raise UserError(f"study.learning_rates: {arm.name!r} fails at each of them")
        pick = min if METRICS[self.study.metric] == "less" else max
        chosen = pick(finite, key=lambda rate: finite[rate])
        edge = chosen in (min(found), max(found))
        if edge:
            self.say(f"tuning {arm.name}: {chosen:g} is best and lies at the edge of those tried: widen the grid")
        return {"chosen": chosen, "at_the_edge": edge, "found": {f"{rate:g}": value for rate, value in found.items()}}

    def place(self, experiment: Experiment, directory: Path) -> Path:
        """Where a run is kept: in ``directory``, or beside it where that has a run of other settings, which stays."""
        if hosts.agree(lambda: (directory / CONFIG).is_file() and runs.read_config(directory) != experiment):
            return directory.with_name(f"{directory.name}.{experiment.name}")
        return directory

    def origin(self, experiment: Experiment) -> dict[str, str]:
        """What a result depends on."""
        prepared = self.text_of(experiment)
        hashes = {"content_hash": prepared.content_hash, "tokenizer_hash": prepared.tokenizer.fingerprint}
        return {"config": experiment.name, **hashes}

    def known(self, experiment: Experiment, directory: Path) -> dict[str, Any] | None:
        """The result of a run that is finished; None where there is none yet."""
        found = directory / RESULT
        result: dict[str, Any] | None = hosts.agree(lambda: read_object(found) if found.is_file() else None)
        if result is None:
            return None
        if any(result.get(key) != value for key, value in self.origin(experiment).items()):
            raise UserError(f"{directory}: its text has changed since it was run; choose another directory")
        return result

    @property
    def lanes(self) -> int:
        """How many runs are trained at once: one, where a run is cut over several devices or processes."""
        alone = hosts.count() > 1 or math.prod(sizes(self.study.baseline.mesh).values()) > 1
        return 1 if alone else self.study.lanes or len(jax.devices())

    def train(self, group: Sequence[tuple[Experiment, Path]]) -> None:
        """Train some runs, or go on with them, and note what each ended with."""
        experiments, places = [e for e, _ in group], [place for _, place in group]
        ended = train_together(experiments, places, self.cache, self.argv, self.log)
        self.ended.update(zip(places, ended, strict=True))

    def one(self, experiment: Experiment, directory: Path, samples: bool = False) -> dict[str, Any] | None:
        """Measure a run that was trained, and continue the prompts where ``samples`` are wanted; returns its result.

        None where the run ended with an error that is worth another try.
        """
        origin = self.origin(experiment)
        try:
            if error := self.ended.pop(directory):
                raise error
            result = origin | self.measure(experiment, directory)
            if samples:
                self.sample(directory)
        except FloatingPointError as error:  # that is what this configuration does, now and the next time
            result = origin | {"failed": str(error)}
        except Exception as error:
            if hosts.count() > 1:
                raise  # it may be this process's alone: all end here, and the same command goes on
            kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
            self.errors.append(f"{directory}: {kind}{' '.join(str(error).split())}")
            self.say(self.errors[-1])
            return None
        write_json(directory / RESULT, result)
        return result

    def measure(self, experiment: Experiment, directory: Path) -> dict[str, Any]:
        """Loss, perplexity, bits per byte and accuracy of the last weights on the whole validation split."""
        prepared = self.text_of(experiment)
        with jax.set_mesh(make_mesh(experiment.mesh)):
            params, step = runs.open_run(directory).params()
            return {"step": step, **validator(experiment, prepared)(params)}

    def sample(self, directory: Path) -> None:
        """Continue the prompts with the last weights, on one device."""
        if not hosts.is_first():
            return
        run = runs.open_run(directory).on_one_device()
        with jax.set_mesh(make_mesh(Mesh(), jax.local_devices())):
            show(run, *run.params(alone=True))

    def log(self, line: str) -> None:
        if not hosts.is_first():
            return
        with (self.workdir / LOG).open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    def values(self, found: dict[str, dict[int, dict[str, Any]]], arm: Arm) -> dict[int, float | None]:
        return {seed: result.get(self.study.metric) for seed, result in found[arm.name].items()}

    def comparisons(self, arms: Sequence[Arm], found: dict[str, dict[int, dict[str, Any]]]) -> dict[str, Comparison]:
        if len(arms) == 1:
            return {}
        others = {arm.name: self.values(found, arm) for arm in arms[1:]}
        less = METRICS[self.study.metric] == "less"
        return compare(others, self.values(found, arms[0]), lower_is_better=less)

    def write(
        self, arms: Sequence[Arm], found: dict[str, dict[int, dict[str, Any]]], rates: dict[str, Any]
    ) -> dict[str, Any]:
        """Write results.json: what study.json says and, of every arm, the metric by seed and the comparison.

        Of a single arm that is returned and not written.
        """
        compared = self.comparisons(arms, found)
        whole = to_json(self.study, arms)
        for row, arm in zip(whole["arms"], arms, strict=True):
            row["seeds"] = {str(seed): found[arm.name].get(seed) for seed in self.study.seeds}
            finite = [value for value in self.values(found, arm).values() if value is not None]
            row["mean"] = means.fmean(finite) if finite else None
            row["sd"] = means.stdev(finite) if len(finite) > 1 else None
            row["learning_rate"] = rates.get(arm.name, {"chosen": arm.experiment.train.learning_rate})
            if arm.name in compared:
                row["comparison"] = compared[arm.name].as_dict()
                row["in_words"] = compared[arm.name].in_words(UNITS[self.study.metric])
        if self.arm is None:
            write_json(self.workdir / RESULTS, whole)
        return whole


def shown(value: float | None) -> str:
    return "no number" if value is None else f"{value:.4f}"


def verdicts(results: dict[str, Any]) -> str:
    """How many arms are better, worse and not resolved by what there is so far."""
    count = Counter(row["comparison"]["verdict"] for row in results["arms"] if "comparison" in row)
    return ", ".join(f"{number} {verdict}" for verdict, number in sorted(count.items())) or "one arm"


def text(results: dict[str, Any]) -> str:
    """The verdicts as a person reads them."""
    lines = [results["question"], ""]
    width = max(len(row["name"]) for row in results["arms"])
    for row in results["arms"]:
        mean = "no number" if row["mean"] is None else f"{shown(row['mean'])} {UNITS[results['metric']]}"
        lines.append(f"{row['name']:<{width}}  {mean}  {row.get('in_words', 'what the others are compared with')}")
    return "\n".join(lines)
