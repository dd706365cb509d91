"""The tasks of lm-evaluation-harness (the extra ``harness``) on a run, or tasks of one's own in its YAML form.

Importing this needs lm-eval. It does the prompts and the metrics; `requests` does the model. Nothing is fetched that
the task's own data set does not ask for: with local files, or HF_HUB_OFFLINE=1 and a filled cache, nothing is.
"""

import random
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from lm_eval.api.model import LM
from lm_eval.defaults import DEFAULT_MAX_GEN_TOKS, DEFAULT_OTHER_SEED, DEFAULT_RANDOM_SEED
from lm_eval.evaluator import evaluate
from lm_eval.tasks import TaskManager

from transformer.analysis.requests import Requests
from transformer.errors import UserError, did_you_mean
from transformer.generation.sampling import Sampling
from transformer.run import Run
from transformer.tables import columns

LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")  # names of one thing, by rank
FILTERS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


class Adapter(LM):  # type: ignore[misc, unused-ignore]
    """The three requests that the harness has, answered by `Requests`."""

    def __init__(self, requests: Requests):
        super().__init__()
        self._requests = requests

    def loglikelihood(self, requests: list[Any]) -> list[tuple[float, bool]]:
        return [tuple(found) for found in self._requests.continuations([r.args for r in requests])]  # type: ignore[misc]

    def loglikelihood_rolling(self, requests: list[Any]) -> list[float]:
        return self._requests.texts([r.args[0] for r in requests])

    def generate_until(self, requests: list[Any]) -> list[str]:
        """Requests with the same settings go on together."""
        settings = [generation(r.args[1]) for r in requests]
        found: dict[int, str] = {}
        for own in dict.fromkeys(settings):
            members = [i for i, other in enumerate(settings) if other == own]
            texts = self._requests.go_on([requests[i].args[0] for i in members], *own)
            found |= dict(zip(members, texts, strict=True))
        return [found[i] for i in range(len(requests))]


def generation(given: dict[str, Any]) -> tuple[Sampling, int, tuple[str, ...]]:
    """How to draw, how many tokens at most, and which texts end them. UserError for a setting that is not here."""
    unknown = sorted(given.keys() - {"until", "do_sample", *LENGTHS, *FILTERS})
    if unknown:
        raise UserError(f"--tasks: a task asks for {unknown[0]}={given[unknown[0]]!r} in generation, which is not here")
    new = next((int(given[name]) for name in LENGTHS if given.get(name) is not None), DEFAULT_MAX_GEN_TOKS)
    until = given.get("until") or ()
    until = (until,) if isinstance(until, str) else tuple(until)
    temperature = given.get("temperature")
    if not given.get("do_sample", bool(temperature)):  # greedy, where filters leave the choice as it is
        return Sampling(temperature=0.0, repetition_penalty=float(given.get("repetition_penalty") or 1)), new, until
    filters = {name: given[name] for name in FILTERS if given.get(name) is not None}
    return Sampling(**{"temperature": 1.0, **filters}), new, until


def load(names: Sequence[str], path: str | None) -> dict[str, Any]:
    """The tasks and groups of these names, those in ``path`` first. UserError for one that is unknown, that cannot be
    loaded, or that needs more than text."""
    if not names:
        raise UserError("--tasks: names none, for example --tasks=arc_easy,lambada_openai")
    if path is not None and not Path(path).is_dir():
        raise UserError(f"--tasks_path: there is no directory {path}")
    manager = TaskManager(include_path=path, include_defaults=False)
    if not set(names) <= set(manager.all_subtasks):  # reading the harness' own takes a while
        manager = TaskManager(include_path=path)
    for name in names:
        if name not in manager.all_tasks:
            near = did_you_mean(name, manager.all_tasks)
            near = near if len(near) < 200 else f" ({len(manager.all_tasks):,} are)"
            raise UserError(f"--tasks: {name!r} is not known{near}")
    try:
        loaded: dict[str, Any] = manager.load(list(names))
    except Exception as error:  # the data sets' library raises what it meets
        raise UserError(f"--tasks: {','.join(names)} cannot be loaded: {type(error).__name__}: {error}") from error
    for name, task in loaded["tasks"].items():
        for mark, what in (("UNSAFE_CODE", "runs code that the model writes"), ("MULTIMODAL", "is not of text alone")):
            if getattr(task, mark, False):
                raise UserError(f"--tasks: {name} {what}, and that is not here")
    return loaded


def run_tasks(
    run: Run,
    params: Any,
    step: int,
    names: Sequence[str],
    path: str | None = None,
    shots: int | None = None,
    limit: int | None = None,
    int8: bool = False,
) -> dict[str, Any]:
    """Every metric of every task: ``shots`` examples before each question (none: as the task says), the first ``limit``
    questions (none: all)."""
    run.of_text("--tasks")
    for flag, value, least in (("shots", shots, 0), ("limit", limit, 1)):
        if value is not None and value < least:
            raise UserError(f"--{flag}: {value} is too small, set {least} or more")
    loaded = load(names, path)
    random.seed(DEFAULT_RANDOM_SEED)  # as the harness does: what tasks shuffle is the same for all models
    np.random.seed(DEFAULT_OTHER_SEED)
    for name, task in loaded["tasks"].items():
        own = task.get_config("num_fewshot")
        if shots and own == 0:
            raise UserError(f"--shots: {name} is defined without examples; leave it out")
        count = (own or 0) if shots is None else shots
        task.set_config("num_fewshot", count)
        try:
            task.fewshot_context(next(iter(task.eval_docs)), count)
        except (AssertionError, ValueError) as error:
            raise UserError(f"--shots: {name} cannot have {count} examples: {error}") from error
        task.set_fewshot_seed(DEFAULT_OTHER_SEED)
    requests = Requests(run, params, int8)
    found = evaluate(Adapter(requests), loaded, limit=limit, log_samples=False)
    return {
        "run": str(run.directory),
        "step": step,
        "harness": version("lm-eval"),
        "context": requests.context,
        "shortened": requests.shortened,
        **({"cache": "int8"} if int8 else {}),
        "results": rows(found),
        "protocol": "context and continuation encoded as one text behind the start token; what is longer than the "
        "context loses its beginning",
    }


def rows(found: dict[str, Any]) -> list[dict[str, Any]]:
    """One for each metric of each task and group."""
    out = []
    for name, metrics in {**found["results"], **found.get("groups", {})}.items():
        for key, value in metrics.items():
            metric, comma, filtered = key.partition(",")
            if not comma or metric.endswith("_stderr"):
                continue
            error = metrics.get(f"{metric}_stderr,{filtered}")
            row = {"task": name, "metric": metric, "filter": filtered, "value": value}
            row["standard_error"] = error if isinstance(error, float) else None
            row["shots"] = found["n-shot"].get(name)
            row["questions"] = found["n-samples"].get(name, {}).get("effective")
            row["higher_is_better"] = found["higher_is_better"].get(name, {}).get(metric)
            out.append(row)
    return out


def sentence(result: dict[str, Any]) -> str:
    """The result as a table."""
    lines = [("task", "metric", "value", "±", "shots", "questions")]
    for row in result["results"]:
        metric = row["metric"] + (f" ({row['filter']})" if row["filter"] != "none" else "")
        numbers = (f"{x:.4f}" if isinstance(x, float) else "" for x in (row["value"], row["standard_error"]))
        counts = ("" if x is None else str(x) for x in (row["shots"], row["questions"]))
        lines.append((row["task"], metric, *numbers, *counts))
    end = f"step {result['step']}, context {result['context']}, {result['shortened']} requests shortened to it"
    return "\n".join([*columns(lines), end + (", int8 cache" if "cache" in result else "")])
