"""What a study will take on this machine, before it starts: a few steps of every arm are timed."""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from transformer.analysis.bench import time_training
from transformer.config import Experiment
from transformer.errors import UserError
from transformer.parallel.mesh import make_mesh
from transformer.study.study import BASELINE, Arm, Study

Price = dict[str, float]  # hours, by arm


def price(study: Study, arms: Sequence[Arm], validation_tokens: Callable[[Experiment], int]) -> Price:
    """Hours of all runs of each arm: measured steps, and the measurement at the end.

    The validation split is read in windows that overlap by half, forward only: a third of a step's work for
    twice its tokens. Compiling and what the loop does between steps are not in it.
    """
    runs, found = len(study.seeds) + len(study.learning_rates), {}
    for arm in arms:
        e = arm.experiment
        with jax.set_mesh(make_mesh(e.mesh)):
            seconds = time_training(e)["seconds_per_step"]
        measuring = 2 * validation_tokens(e) / (e.train.batch * e.model.context) / 3
        found[arm.name] = runs * seconds * (e.train.steps + measuring) / 3600
    return found


def affordable(study: Study, arms: Sequence[Arm], hours: Price) -> list[Arm]:
    """The arms that fit into the study's budget: the last ones are dropped first. UserError where no arm is left."""
    kept = list(arms)
    while study.budget_hours is not None and sum(hours[arm.name] for arm in kept) > study.budget_hours:
        kept.pop()
        if len(kept) < 2:
            raise UserError(
                f"study.budget_hours: {study.budget_hours:g} hours do not pay for {BASELINE} and one arm "
                f"({hours[arms[0].name]:.1f} and {hours[arms[1].name]:.1f} hours here); take fewer steps or seeds"
            )
    return kept


def text(study: Study, arms: Sequence[Arm], hours: Price) -> str:
    """The price as a person reads it."""
    width = max(len(arm.name) for arm in arms)
    lines = [
        study.question,
        "",
        f"{'arm':<{width}}{'parameters':>14}{'training FLOPs':>18}{'steps':>9}{'hours here':>12}",
    ]
    for arm in arms:
        q: dict[Any, float] = dict(arm.quantities)
        lines.append(
            f"{arm.name:<{width}}{q['parameters']:>14,.0f}{q['flops']:>18.3g}{q['steps']:>9,.0f}"
            f"{hours[arm.name]:>12.2f}"
        )
    kept = affordable(study, arms, hours)
    budget = "" if study.budget_hours is None else f" of {study.budget_hours:g}"
    lines.append(
        f"{len(study.seeds)} seeds, {len(study.learning_rates)} learning rates: "
        f"{sum(hours[arm.name] for arm in kept):.2f} hours{budget}"
    )
    if dropped := [arm.name for arm in arms[len(kept) :]]:
        lines.append(f"dropped, as they do not fit: {', '.join(dropped)}")
    return "\n".join(lines)
