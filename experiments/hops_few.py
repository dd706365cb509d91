"""Does one block suffice? The first steps of experiments/hops.py, in minutes.

    python -m transformer study --config=experiments/hops_few.py --workdir=runs/hops_few

k-hop induction (arXiv:2402.09268, section 5) with up to 4 hops in 30 characters, for 1, 2 and 3 blocks of width 32.
All see the same rows for the same number of steps; a deeper model has more weights, which is what is asked about.

Expected: one block fails at the first hop, which two follow; docs/results/hops.md has the run.
Costs: 9 runs of 1,000 steps of 32 rows, some minutes on two CPU cores.
"""

import dataclasses

from experiments import one_hop
from transformer.data.prepare import Data
from transformer.data.tasks.hops import Hops
from transformer.study.study import Study


def get_study() -> Study:
    one = one_hop.get_config()
    return Study(
        question="Does one block suffice to follow a hop, and how many hops do two and three follow?",
        baseline=dataclasses.replace(
            one,
            data=Data(source=Hops(hops=4, characters=4, text=30, validation=1024)),
            train=dataclasses.replace(one.train, steps=1000),
        ),
        grid={"model.depth": (1, 3)},
        seeds=(0, 1, 2),
        metric="error",
        accept=("parameters", "block_parameters", "flops"),
        budget_hours=3,
    )
