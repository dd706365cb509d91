"""How well does a small Transformer learn Shakespeare in five minutes on two CPU cores?

    python -m transformer train --config=experiments/shakespeare.py --workdir=runs/demo

Expected: about 2.31 bits per byte on the four held-out works (Hamlet, The Tempest, Henry V, the
sonnets), where gzip -9 reaches 3.24 and xz -9 2.81.
Costs: about five minutes on two CPU cores and 2.1 GB of memory.
"""

from transformer.config import Experiment
from transformer.data.prepare import Data
from transformer.data.tokenizer import Bpe
from transformer.model.config import Model
from transformer.training.config import Train
from transformer.training.optimizer import Muon


def get_config() -> Experiment:
    return Experiment(
        model=Model(depth=4, width=192, heads=6, context=256),
        tokenizer=Bpe(vocab_size=4096),
        data=Data(source="shakespeare"),
        train=Train(
            steps=350,
            batch=8,
            learning_rate=5e-3,
            warmup=30,
            optimizer=Muon(),
            eval_every=50,
            checkpoint_every=50,
            prompts=("", "Lear.\n", "[Enter "),
        ),
    )
