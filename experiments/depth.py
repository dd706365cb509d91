"""How many blocks? The same number of weights, or the same computation, in 1 to 16 of them.

    python -m transformer study --config=experiments/depth.py --workdir=runs/depth
    python -m transformer study --config=experiments/depth.py --workdir=runs/depth_flops --equal=flops_by_width

Expected: 1 and 2 blocks are better than 4, 8 and 16 worse, both ways; docs/results/depth.md has the runs.
Costs: 30 runs for the learning rates and 25 for the verdicts, each; `cost` says how many hours here.
"""

from transformer.config import Experiment
from transformer.data.prepare import Data
from transformer.data.tokenizer import Bpe
from transformer.model.config import Model
from transformer.study.study import Study
from transformer.training.config import Train
from transformer.training.optimizer import Muon


def get_study() -> Study:
    return Study(
        question="At equal parameters (or equal FLOPs), how many blocks give the best language model?",
        baseline=Experiment(
            model=Model(depth=4, width=128, heads=4, context=256),
            tokenizer=Bpe(vocab_size=2048),
            data=Data(source="shakespeare"),
            train=Train(
                steps=300, batch=8, learning_rate=5e-3, warmup=30, optimizer=Muon(), eval_every=50, eval_windows=64
            ),
        ),
        grid={"model.depth": (1, 2, 8, 16)},
        equal="parameters",
        accept=(
            "parameters",
            "block_parameters",
            "flops",
        ),  # of the two that are not held, and what each brings with it
        learning_rates=(2.5e-3, 5e-3, 1e-2, 2e-2, 4e-2, 8e-2),
        budget_hours=3,
    )
