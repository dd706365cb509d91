"""How many blocks, how many heads, how much context does recall take?

    python -m transformer study --config=experiments/recall.py --workdir=runs/recall

The task is multi-query associative recall (arXiv:2312.04927): eight pairs of a key and its value, then all eight keys
again in another order. Arms have one block instead of two, three, other numbers of heads, and blanks between the pairs
and the questions that make rows of 24 positions into rows of 48.

Expected: one block stays where it knows only which values there were, as a key's value is one place behind the key, and
two heads in a row (one that looks back by one, one that looks for the same) are what finds it. Found: three blocks do,
two with one head mostly, two with more heads not in 600 steps; docs/results/recall.md has the run.
Costs: 21 runs of 600 steps of 32 rows; `cost` says how many hours here. If they are more than the budget of three, the
last arms are dropped first, and listed; seeds are not.
"""

from transformer.config import Experiment
from transformer.data.prepare import Data
from transformer.data.tasks.recall import Recall
from transformer.data.tokenizer import Symbols
from transformer.model.config import Model
from transformer.model.positions import Rotary
from transformer.study.study import Study
from transformer.training.config import Train
from transformer.training.optimizer import Muon


def get_study() -> Study:
    return Study(
        question="What does recall of key-value pairs take: depth, heads, or a short context?",
        baseline=Experiment(
            model=Model(depth=2, width=64, heads=2, context=48, positions=Rotary()),
            tokenizer=Symbols(),
            data=Data(source=Recall(pairs=8, keys=16, values=16, validation=1024)),
            train=Train(
                steps=600,
                batch=32,
                learning_rate=5e-3,
                warmup=50,
                weight_decay=0.01,
                optimizer=Muon(),
                eval_every=100,
                eval_windows=256,
                checkpoint_every=300,
            ),
        ),
        arms={
            "one block": {"model.depth": 1},
            "three blocks": {"model.depth": 3},
            "one head": {"model.heads": 1},
            "four heads": {"model.heads": 4},
            "questions 24 positions later": {"data.source.filler": 24},
            "one block, four heads": {"model.depth": 1, "model.heads": 4},
        },
        seeds=(0, 1, 2),
        metric="error",
        accept=("parameters", "block_parameters", "flops", "bytes"),
        budget_hours=3,
    )
