"""Does one block suffice? The first steps of experiments/hops.py, in minutes.

    python -m transformer study --config=experiments/hops_few.py --workdir=runs/hops_few

k-hop induction (arXiv:2402.09268, section 5) with up to 4 hops in 30 characters, for 1, 2 and 3 blocks of width 32.
All see the same rows for the same number of steps; a deeper model has more weights, which is what is asked about.

Expected: one block fails at the first hop, which two follow; docs/results/hops.md has the run.
Costs: 9 runs of 1,000 steps of 32 rows, some minutes on two CPU cores.
"""

from transformer.config import Experiment
from transformer.data.prepare import Data
from transformer.data.tasks.hops import Hops
from transformer.data.tokenizer import Symbols
from transformer.model.config import Model
from transformer.model.positions import Rotary
from transformer.study.study import Study
from transformer.training.config import Train
from transformer.training.optimizer import Muon


def get_study() -> Study:
    return Study(
        question="Does one block suffice to follow a hop, and how many hops do two and three follow?",
        baseline=Experiment(
            model=Model(depth=2, width=32, heads=2, context=31, positions=Rotary()),
            tokenizer=Symbols(),
            data=Data(source=Hops(hops=4, characters=4, text=30, validation=1024)),
            train=Train(
                steps=1000,
                batch=32,
                learning_rate=1e-2,
                warmup=30,
                weight_decay=0.01,
                optimizer=Muon(),
                eval_every=200,
                eval_windows=256,
                checkpoint_every=500,
            ),
        ),
        grid={"model.depth": (1, 3)},
        seeds=(0, 1, 2),
        metric="error",
        accept=("parameters", "block_parameters", "flops"),
        budget_hours=3,
    )
