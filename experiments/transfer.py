"""Does the best learning rate of a shallow model hold for a deep one? Depth 2 to 32 under three parametrisations.

    python -m transformer study --config=experiments/transfer.py --workdir=runs/transfer

Every arm tries the same learning rates, and the answer is where each is best: `learning_rate` of the arms in
results.json, and the table of what was tried in the report. The verdicts, against the base model of 2 blocks at its own
best rate, are of less interest. muP is not among the arms, since at the base width it is the standard one, to the
bit; at 2 blocks all three are.

Expected: rates above the best cost deep standard models most and depth-muP's least; the best itself moves by a factor
of two, within what seeds do (docs/results/transfer.md).
Costs: 13 arms of 7 learning rates and 3 seeds; `cost` says how many hours here. Where 3 hours do not pay for it, depths
are left out, not seeds: 4 blocks first, then 16, and 8 before 32.
"""

from collections.abc import Sequence
from typing import Any

from transformer.config import Experiment
from transformer.data.prepare import Data
from transformer.data.tokenizer import Bytes
from transformer.model.config import Model
from transformer.study.study import Study
from transformer.training.config import Train

BASE = {"base_width": 64, "base_head_width": 16, "base_depth": 2}
DEPTHS = (32, 8, 16, 4)  # the most telling first: what does not fit is dropped from the end
PARAMETRISATIONS = ("standard", "completep", "depth_mup")
RATES = (5e-4, 1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2)


def arm(parametrisation: str, depth: int) -> dict[str, Any]:
    """The settings of one arm."""
    where = "model.parametrisation"
    found: dict[str, Any] = {"model.depth": depth, where: parametrisation}
    return found | ({} if parametrisation == "standard" else {f"{where}.{name}": size for name, size in BASE.items()})


def study(
    *,
    depths: Sequence[int] = DEPTHS,
    parametrisations: Sequence[str] = PARAMETRISATIONS,
    learning_rates: tuple[float, ...] = RATES,
) -> Study:
    """The study of some depths, or of fewer parametrisations or rates."""
    return Study(
        question="Does the learning rate that is best for 2 blocks stay the best for deeper models?",
        baseline=Experiment(
            model=Model(depth=2, width=64, heads=4, context=64, stack="scan"),
            tokenizer=Bytes(),
            data=Data(source="python_prose", validation=0.02),
            train=Train(steps=300, batch=8, warmup=30, eval_every=100, eval_windows=64),
        ),
        arms={f"{name}, {depth} blocks": arm(name, depth) for depth in depths for name in parametrisations},
        seeds=(0, 1, 2),
        accept=("parameters", "block_parameters", "flops"),  # depth is what is asked about
        learning_rates=learning_rates,
        budget_hours=3,
    )


def get_study() -> Study:
    return study()
