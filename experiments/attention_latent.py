"""How well does latent attention learn Shakespeare with a fifth of multi-head attention's cache?

    python -m transformer train --config=experiments/attention_latent.py --workdir=runs/attention_latent

Each token leaves 32 numbers and a rotary key of 16 in a block's cache; multi-head attention would leave 256.

Expected: about 2.33 bits per byte on the four held-out works.
Costs: about two minutes on two CPU cores.
"""

from transformer.config import Experiment
from transformer.data.prepare import Data
from transformer.data.tokenizer import Bpe
from transformer.model.attention import Attention
from transformer.model.config import Model
from transformer.model.latent import Latent
from transformer.model.positions import Rotary
from transformer.training.config import Train
from transformer.training.optimizer import Muon


def get_config() -> Experiment:
    attention = Attention(projection=Latent(kv_rank=32, rope_width=16))
    return Experiment(
        model=Model(depth=4, width=128, heads=4, context=256, attention=attention, positions=Rotary()),
        tokenizer=Bpe(vocab_size=2048),
        data=Data(source="shakespeare"),
        train=Train(steps=300, batch=8, learning_rate=1e-2, warmup=30, optimizer=Muon(), eval_every=100),
    )
