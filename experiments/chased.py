"""What comes next in "the cat chased", where the chances are known?

    python -m transformer train --config=experiments/chased.py --workdir=runs/chased
    python -m transformer inspect --run=runs/chased --prompt='the cat chased the mouse.' --position=3

The text is generated sentences (transformer/data/sentences.py): behind "the cat chased" comes "the" in 7 of 10, "its"
in 2, "a" in 1. `--config.model.depth=1` trains the model of one block.

Expected: chances within a hundredth or two of those of the text.
Costs: under a minute on two CPU cores.
"""

from transformer.config import Experiment
from transformer.data.prepare import Data
from transformer.data.tokenizer import Bpe
from transformer.model.config import Model
from transformer.training.config import Train
from transformer.training.optimizer import Muon


def get_config() -> Experiment:
    return Experiment(
        model=Model(depth=2, width=64, heads=4, context=64),
        tokenizer=Bpe(vocab_size=330),
        data=Data(source="sentences"),
        train=Train(
            steps=300,
            batch=32,
            learning_rate=1e-2,
            warmup=20,
            optimizer=Muon(),
            eval_every=100,
            prompts=("the cat chased",),
        ),
    )
