"""Do the first block's values help the blocks after it?

    python -m transformer train --config=experiments/attention_value_residual.py --workdir=runs/attention_value_residual

The same without: --config.model.attention.value_residual=none.

Expected: about 2.3 bits per byte on the four held-out works, as the other kinds of this size; not run to its end yet.
Costs: about two minutes on two CPU cores.
"""

from transformer.config import Experiment
from transformer.data.prepare import Data
from transformer.data.tokenizer import Bpe
from transformer.model.attention import Attention
from transformer.model.config import Model
from transformer.model.positions import Rotary
from transformer.training.config import Train
from transformer.training.optimizer import Muon


def get_config() -> Experiment:
    attention = Attention(value_residual="learned")
    return Experiment(
        model=Model(depth=4, width=128, heads=4, context=256, attention=attention, positions=Rotary()),
        tokenizer=Bpe(vocab_size=2048),
        data=Data(source="shakespeare"),
        train=Train(steps=300, batch=8, learning_rate=1e-2, warmup=30, optimizer=Muon(), eval_every=100),
    )
