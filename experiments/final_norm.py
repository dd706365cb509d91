"""Does a pre-norm Transformer need the norm after its last block?

    python -m transformer study --config=experiments/final_norm.py --workdir=runs/final_norm

Expected: docs/results/final_norm.md has the verdict.
Costs: 8 runs for the learning rates and 10 for the verdict, about half an hour on two CPU cores.
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
        question="Does a pre-norm Transformer need the norm after its last block?",
        baseline=Experiment(
            model=Model(depth=4, width=128, heads=4, context=256),
            tokenizer=Bpe(vocab_size=2048),
            data=Data(source="shakespeare"),
            train=Train(
                steps=300, batch=8, learning_rate=5e-3, warmup=30, optimizer=Muon(), eval_every=50, eval_windows=64
            ),
        ),
        arms={"no final norm": {"model.final_norm": False}},
        learning_rates=(5e-3, 1e-2, 2e-2, 4e-2),
        budget_hours=3,
    )
