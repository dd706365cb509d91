"""Does the instrument work? A difference that is there, and one that is not.

    python -m transformer study --config=experiments/planted.py --workdir=runs/planted

Expected: the arm whose learning rate is near zero is *worse*; the baseline under other seeds is *not resolved*.
Costs: 15 runs, 3 minutes 9 seconds on two CPU cores.
"""

from transformer.config import Experiment
from transformer.data.prepare import Data
from transformer.data.tokenizer import Bpe
from transformer.model.config import Model
from transformer.study.study import Study
from transformer.training.config import Train


def get_study() -> Study:
    return Study(
        question="Is a learning rate near zero worse, and is the baseline as good as itself?",
        baseline=Experiment(
            model=Model(depth=2, width=64, heads=4, context=128),
            tokenizer=Bpe(vocab_size=1024),
            data=Data(source="shakespeare"),
            train=Train(steps=120, batch=8, learning_rate=5e-3, warmup=12, eval_every=40, eval_windows=64),
        ),
        arms={"near zero": {"train.learning_rate": 1e-6}},
        again=True,
    )
