"""Which attention? Quality against the cache's bytes per token, on the plays; `attention_recall.py`: on recall.

    python -m transformer study --config=experiments/attention.py --workdir=runs/attention
    python -m transformer study --config=experiments/attention_recall.py --workdir=runs/attention_recall

A model of 4 blocks, width 128, 4 heads and rotary positions; each arm has another attention and nothing else. What a
token leaves in a block's cache is `cost`'s: 1,024 bytes for multi-head, 512 grouped, 256 multi-query, 192 latent; a
window keeps the last 64 tokens alone, linear attention a state of 16 KiB a block.

Expected: a verdict on each against multi-head attention, tuned to its own learning rate. Found: the window is better,
the others are not told apart with 3 seeds; docs/results/attention.md has the run.
Costs: 24 runs for the learning rates and 24 for the verdicts; `cost` says how many hours here. What does not fit into
three hours is dropped from the last arm on, and listed; seeds are not.
"""

from typing import Any

from transformer.config import Experiment
from transformer.data.prepare import Data
from transformer.data.tokenizer import Bpe
from transformer.model.attention import Attention
from transformer.model.config import Model
from transformer.model.positions import Rotary
from transformer.study.study import Study
from transformer.training.config import Train
from transformer.training.optimizer import Muon

OF = "model.attention"
ARMS: dict[str, dict[str, Any]] = {
    "grouped": {f"{OF}.projection": "grouped", f"{OF}.projection.kv_heads": 2},
    "latent": {f"{OF}.projection": "latent", f"{OF}.projection.kv_rank": 32},
    "linear": {f"{OF}.projection": "linear"},
    "window": {f"{OF}.span": "sliding", f"{OF}.span.window": 64},
    "differential": {f"{OF}.projection": "differential"},
    "sigmoid": {f"{OF}.scores": "sigmoid"},
    "multi-query": {f"{OF}.projection": "multi_query"},
}


def study(baseline: Experiment, arms: dict[str, dict[str, Any]] = ARMS, **more: Any) -> Study:
    """The arms, beside a model with multi-head attention."""
    return Study(
        question="Which kind of attention gives the best model, for how large a cache?",
        baseline=baseline,
        arms=arms,
        seeds=(0, 1, 2),
        accept=("parameters", "block_parameters", "flops", "bytes"),
        budget_hours=3,
        **more,
    )


def get_study() -> Study:
    return study(
        Experiment(
            model=Model(depth=4, width=128, heads=4, context=256, attention=Attention(), positions=Rotary()),
            tokenizer=Bpe(vocab_size=2048),
            data=Data(source="shakespeare"),
            train=Train(
                steps=300, batch=8, learning_rate=1e-2, warmup=30, optimizer=Muon(), eval_every=50, eval_windows=64
            ),
        ),
        learning_rates=(5e-3, 1e-2, 2e-2),
    )
