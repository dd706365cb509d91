"""Which attention recalls? Key-value pairs in a context that is longer than a window of 64 and than a state is wide.

    python -m transformer study --config=experiments/attention_recall.py --workdir=runs/attention_recall

Multi-query associative recall (arXiv:2312.04927) of 32 pairs in rows of 96 positions, by the arms of `attention.py`.

Expected: not known yet; whole attention recalls all, a window what it reaches, a state of fixed size less the more
pairs there are.
Costs: 24 runs of 600 steps of 32 rows; `cost` says how many hours here. Dropped as in `attention.py`. Not run to its
end yet.
"""

from experiments.attention import study
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
    return study(
        Experiment(
            model=Model(depth=2, width=64, heads=2, context=96, positions=Rotary()),
            tokenizer=Symbols(),
            data=Data(source=Recall(pairs=32, keys=64, values=64, validation=1024)),
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
        metric="error",
    )
