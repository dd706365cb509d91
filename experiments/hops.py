"""Does one block suffice? How many hops can 1 to 5 blocks follow?

    python -m transformer study --config=experiments/hops.py --workdir=runs/hops

The task is k-hop induction (arXiv:2402.09268, section 5), smaller than published: up to 8 hops instead of 16, in 50
characters instead of 98. All depths see the same rows for the same number of steps, at one learning rate, which was
tried with 3 and 4 blocks; a deeper model has more weights, which is what is asked about.

Expected: 1 to 5 blocks solve 0, 2, 5, 7 and all 8 hops; in a fifth of the steps (`--config.train.steps=800`) each block
brings one hop. docs/results/hops.md has both. The published models of 2, 3, 4 and 5 blocks solve about 1, 3, 7 and 11.
Costs: 15 runs of 4,000 steps of 32 rows; `cost` says how many hours here. If they are more than the budget of three,
the deepest arms are dropped first, and listed; seeds are not.
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
        question="How many hops of k-hop induction can a model of so many blocks follow?",
        baseline=Experiment(
            model=Model(depth=2, width=64, heads=2, context=51, positions=Rotary()),
            tokenizer=Symbols(),
            data=Data(source=Hops(hops=8, characters=4, text=50, validation=1024)),
            train=Train(
                steps=4000,
                batch=32,
                learning_rate=5e-3,
                warmup=50,
                weight_decay=0.01,
                optimizer=Muon(),
                eval_every=100,
                eval_windows=256,
                checkpoint_every=2000,
            ),
        ),
        grid={"model.depth": (1, 3, 4, 5)},
        seeds=(0, 1, 2),
        metric="error",
        accept=("parameters", "block_parameters", "flops"),
        budget_hours=3,
    )
