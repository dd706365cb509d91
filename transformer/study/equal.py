"""What a study holds equal, and how a width or a number of steps is found that makes it so."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Literal

from transformer.analysis.cost import count_parameters, training_flops
from transformer.config import Experiment
from transformer.errors import UserError
from transformer.model.differential import Differential
from transformer.model.positions import Rotary, Sinusoidal
from transformer.settings import override

Quantity = Literal["steps", "tokens", "bytes", "parameters", "block_parameters", "flops"]
Held = Literal["steps", "tokens", "bytes", "parameters", "block_parameters", "flops_by_steps", "flops_by_width"]
BytesPerRow = Callable[[Experiment], float]

TOLERANCE = 0.01
QUANTITIES: tuple[Quantity, ...] = ("steps", "tokens", "bytes", "parameters", "block_parameters", "flops")
# What is held: the quantity, and what is solved for.
HELD: dict[Held, tuple[Quantity, Literal["steps", "width"] | None]] = {
    "steps": ("steps", None),
    "tokens": ("tokens", "steps"),
    "bytes": ("bytes", "steps"),
    "parameters": ("parameters", "width"),
    "block_parameters": ("block_parameters", "width"),
    "flops_by_steps": ("flops", "steps"),
    "flops_by_width": ("flops", "width"),
}


def quantities(experiment: Experiment, bytes_per_row: BytesPerRow) -> dict[Quantity, float]:
    """Of a whole training: updates, positions, bytes of source text, and FLOPs; and of the model: its weights."""
    train, parameters = experiment.train, count_parameters(experiment)
    rows = train.steps * train.batch
    tokens = rows * experiment.model.context
    return {
        "steps": train.steps,
        "tokens": tokens,
        "bytes": rows * bytes_per_row(experiment),
        "parameters": parameters["total"],
        "block_parameters": parameters["blocks"],
        "flops": tokens * training_flops(experiment),
    }


def solve(
    held: Held, experiment: Experiment, target: Mapping[Quantity, float], fixed: set[str], bytes_per_row: BytesPerRow
) -> Experiment:
    """``experiment`` with other steps, or other widths of model and MLP, so that what is held is within 1 %.

    ``target`` has the quantities of the baseline. Nothing of ``fixed`` (dotted names) is changed. UserError where it
    cannot be done.
    """
    quantity, unknown = HELD[held]
    wanted = target[quantity]

    def miss(e: Experiment) -> float:
        return abs(quantities(e, bytes_per_row)[quantity] / wanted - 1)

    if unknown is None or miss(experiment) == 0:
        return experiment
    if unknown == "steps":
        if "train.steps" in fixed:
            raise UserError(f"equal: train.steps is changed by the arm, so {held} cannot be solved for it")
        found = with_steps(
            experiment, round(experiment.train.steps * wanted / _value(experiment, quantity, bytes_per_row))
        )
        return _near(found, miss(found), quantity)
    options = list(_widths(experiment, fixed, lambda e: _value(e, quantity, bytes_per_row), wanted))
    found = min(options, key=miss)
    if miss(found) > TOLERANCE and "model.mlp.width" not in fixed:
        options = [fit for e in options for fit in _mlp_widths(e, lambda e: _value(e, quantity, bytes_per_row), wanted)]
        found = next((e for e in options if miss(e) <= TOLERANCE), min([found, *options], key=miss))
    return _near(found, miss(found), quantity)


def _value(e: Experiment, quantity: Quantity, bytes_per_row: BytesPerRow) -> float:
    return quantities(e, bytes_per_row)[quantity]


def _near(found: Experiment, miss: float, quantity: Quantity) -> Experiment:
    if miss > TOLERANCE:
        raise UserError(f"equal: {quantity} can only be brought to within {miss:.1%} of the baseline's, not 1 %")
    return found


def with_steps(experiment: Experiment, steps: int) -> Experiment:
    """Another number of steps; the warm-up keeps its share, and the run is measured as often."""
    train = experiment.train
    steps = max(1, steps)

    def scaled(number: int) -> int:
        return round(number * steps / train.steps)

    every = max(1, scaled(train.eval_every))
    train = dataclasses.replace(train, steps=steps, warmup=scaled(train.warmup), eval_every=every)
    return dataclasses.replace(experiment, train=train)


def _widths(
    experiment: Experiment, fixed: set[str], value: Callable[[Experiment], float], wanted: float
) -> Iterator[Experiment]:
    """The widest model below ``wanted`` and the narrowest one above it; where the width is fixed, the model itself."""
    model = experiment.model
    if "model.width" in fixed:
        yield experiment
        return
    unit = 8
    if model.head_width is None:  # heads divide the width, and may be halved; rotary positions turn pairs within one
        halves = 2 if isinstance(model.attention.projection, Differential) else 1
        pairs = 2 if isinstance(model.positions, Rotary) else 1
        unit = math.lcm(model.heads * halves * pairs, 2 if isinstance(model.positions, Sinusoidal) else 1)

    def at(units: int) -> Experiment:
        return override(experiment, {"model.width": units * unit})

    low, high = 0, 1
    while value(at(high)) < wanted:  # everything that is held grows with the width
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if value(at(middle)) < wanted else (low, middle)
    yield from (at(units) for units in (low, high) if units)


def _mlp_widths(experiment: Experiment, value: Callable[[Experiment], float], wanted: float) -> Iterator[Experiment]:
    """The two MLP widths on either side of ``wanted``: in eights, which products like, then in ones."""

    def at(width: int) -> Experiment:
        return override(experiment, {"model.mlp.width": width})

    slope = (value(at(1025)) - value(at(1))) / 1024  # all that is held is linear in the MLP's width
    exact = 1 + (wanted - value(at(1))) / slope
    for unit in (8, 1):
        for width in (int(exact // unit) * unit, int(exact // unit) * unit + unit):
            if width >= 1:
                yield at(width)
