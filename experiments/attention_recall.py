"""Which attention recalls? Key-value pairs that lie further back than a window of 8 reaches.

    python -m transformer study --config=experiments/attention_recall.py --workdir=runs/attention_recall

Multi-query associative recall (arXiv:2312.04927) of 8 pairs in rows of 24 positions by 3 blocks, which with multi-head
attention recall all of them (docs/results/recall.md), with the arms of `attention.py`, but grouped attention: with 2
heads that is multi-head or multi-query.

Expected: whole attention recalls all, a window less, though three windows on top of each other reach 21 back; of the
rest a verdict on each. docs/results/attention.md has what was run.
Costs: 21 runs of 600 steps of 32 rows; `cost` says how many hours here. Dropped as in `attention.py`. 32 pairs in
rows of 96 are too many for it: nothing is recalled after 1,000 steps.
"""

import dataclasses

from experiments import recall
from experiments.attention import ARMS, OF, study
from transformer.study.study import Study


def get_study() -> Study:
    """The baseline of `recall.py`, one block deeper."""
    base = recall.get_study().baseline
    deeper = dataclasses.replace(base, model=dataclasses.replace(base.model, depth=3))
    arms = {name: changes for name, changes in ARMS.items() if name != "grouped"}
    arms["window"] = {f"{OF}.span": "sliding", f"{OF}.span.window": 8}
    return study(deeper, arms=arms, metric="error")
