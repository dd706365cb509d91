"""What does a second block buy? A task that takes two steps, for any number of blocks.

    python -m transformer train --config=experiments/one_hop.py --workdir=runs/two_blocks
    python -m transformer train --config=experiments/one_hop.py --workdir=runs/one_block --config.model.depth=1

One hop of k-hop induction (arXiv:2402.09268, section 5): where was this character last, and what came behind it? Each
place has to learn first what stands before it; only then can it be found by that.

Expected: two blocks make no mistake, one block many; experiments/hops_few.py asks the same of three seeds.
Costs: under a minute on two CPU cores.
"""

from transformer.config import Experiment
from transformer.data.prepare import Data
from transformer.data.tasks.hops import Hops
from transformer.data.tokenizer import Symbols
from transformer.model.config import Model
from transformer.model.positions import Rotary
from transformer.training.config import Train
from transformer.training.optimizer import Muon


def get_config() -> Experiment:
    return Experiment(
        model=Model(depth=2, width=32, heads=2, context=31, positions=Rotary()),
        tokenizer=Symbols(),
        data=Data(source=Hops(hops=1, characters=4, text=30, validation=1024)),
        train=Train(
            steps=500,
            batch=32,
            learning_rate=1e-2,
            warmup=30,
            weight_decay=0.01,
            optimizer=Muon(),
            eval_every=200,
            eval_windows=256,
            checkpoint_every=500,
        ),
    )
