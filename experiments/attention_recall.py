"""Which attention recalls? Key-value pairs in a context that is longer than a window of 64 and than a state is wide.

    python -m transformer study --config=experiments/attention_recall.py --workdir=runs/attention_recall

Multi-query associative recall (arXiv:2312.04927) of 32 pairs in rows of 96 positions, by the arms of `attention.py`.

Expected: not known yet; whole attention recalls all, a window what it reaches, a state of fixed size less the more
pairs there are.
Costs: 24 runs of 600 steps of 32 rows; `cost` says how many hours here. Dropped as in `attention.py`. Not run to its
end yet.
"""

import dataclasses

from experiments import recall
from experiments.attention import study
from transformer.data.prepare import Data
from transformer.data.tasks.recall import Recall
from transformer.study.study import Study


def get_study() -> Study:
    """The baseline of `recall.py`, with more pairs in longer rows."""
    base = recall.get_study().baseline
    baseline = dataclasses.replace(
        base,
        model=dataclasses.replace(base.model, context=96),
        data=Data(source=Recall(pairs=32, keys=64, values=64, validation=1024)),
    )
    return study(baseline, metric="error")
