"""How well does linear attention learn Shakespeare, with a state of fixed size in place of keys and values?

    python -m transformer train --config=experiments/attention_linear.py --workdir=runs/attention_linear

A block remembers 4 x 32 x 32 numbers of a text of any length, as much as 16 tokens are in a multi-head cache.

Expected: about 2.31 bits per byte on the four held-out works.
Costs: about two minutes on two CPU cores.
"""

from transformer.config import Experiment
from transformer.data.prepare import Data
from transformer.data.tokenizer import Bpe
from transformer.model.attention import Attention
from transformer.model.config import Model
from transformer.model.linear import Linear
from transformer.model.positions import Rotary
from transformer.training.config import Train
from transformer.training.optimizer import Muon


def get_config() -> Experiment:
    attention = Attention(projection=Linear(), gate=True)
    return Experiment(
        model=Model(depth=4, width=128, heads=4, context=256, attention=attention, positions=Rotary()),
        tokenizer=Bpe(vocab_size=2048),
        data=Data(source="shakespeare"),
        train=Train(steps=300, batch=8, learning_rate=1e-2, warmup=30, optimizer=Muon(), eval_every=100),
    )
