"""What does a learning rate cost 2 blocks, and what 32 under three parametrisations? Every rate with three seeds.

    python -m transformer study --config=experiments/transfer_rates.py --workdir=runs/transfer_rates

transfer.py tries each rate once, at more depths. Here the curves over the rate have an error: each arm is a depth, a
parametrisation and a rate, and the verdicts are against 2 blocks at 0.002.

Expected: 0.002 is the best or level with it but under depth-muP (0.004), whose rates up to 0.016 are all as good; under
standard eight times the best costs 0.31 bits, under CompleteP 0.17 (docs/results/transfer.md).
Costs: 20 arms and 3 seeds; `cost` says how many hours here. Where 3 hours do not pay for it, the rates at the ends of
the grid are left out first.
"""

import dataclasses
from collections.abc import Sequence

from experiments import transfer
from transformer.settings import override
from transformer.study.study import Study

RATES = (2e-3, 4e-3, 1e-3, 8e-3, 1.6e-2)  # the middle first: what does not fit is dropped from the end


def study(*, depths: Sequence[int] = (2, 32), rates: Sequence[float] = RATES) -> Study:
    """The study of some rates, at the base's depth and at others."""
    base, arms = transfer.study(), {}
    for rate in rates:
        for depth in depths:
            kinds = ("standard",) if depth == transfer.BASE["base_depth"] else transfer.PARAMETRISATIONS
            for kind in kinds:
                arms[f"{kind}, {depth} blocks, {rate:g}"] = transfer.arm(kind, depth) | {"train.learning_rate": rate}
    arms.pop(f"standard, {transfer.BASE['base_depth']} blocks, {rates[0]:g}")  # is the baseline
    return dataclasses.replace(
        base,
        question="What does each learning rate cost a shallow model, and what a deep one?",
        baseline=override(base.baseline, {"train.learning_rate": rates[0]}),
        arms=arms,
        learning_rates=(),
    )


def get_study() -> Study:
    return study()
