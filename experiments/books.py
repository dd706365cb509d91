"""How far do two CPU cores get on a shelf of books?

    python -m transformer train --config=experiments/books.py --workdir=runs/books --config.data.source=DIR

where DIR holds plain text files (about 38 MB of public-domain books for the run in docs/results/books.md).
Expected: docs/results/books.md has the run, its curve and its samples.
Costs: 1,500 steps of 2,048 positions, about an hour on two CPU cores, and 2 GiB of memory.
"""

from transformer.config import Experiment
from transformer.data.prepare import Data
from transformer.data.tokenizer import Bpe
from transformer.model.config import Model
from transformer.training.config import Train
from transformer.training.optimizer import Muon


def get_config() -> Experiment:
    return Experiment(
        model=Model(depth=6, width=320, heads=5, context=256, tie_embeddings=True, dtype="bfloat16"),
        tokenizer=Bpe(vocab_size=8192),
        data=Data(source="books", validation=0.05),
        train=Train(
            steps=1500,
            batch=8,
            learning_rate=4e-3,
            warmup=50,
            optimizer=Muon(),
            eval_every=100,
            eval_windows=64,
            prompts=("", "It was the ", "The origin of "),
        ),
    )
