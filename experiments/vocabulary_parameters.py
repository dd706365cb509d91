"""Is a larger vocabulary worth its weights? Four sizes of BPE at equal parameters: what tables take, blocks lack.

    python -m transformer study --config=experiments/vocabulary_parameters.py --workdir=runs/vocabulary_parameters

The width is solved for; the steps are equal, so a larger vocabulary reads more text in them. vocabulary.py has the
studies at equal bytes and at equal FLOPs.

Expected: larger is better even so, 8,192 entries by 0.085 (docs/results/vocabulary.md).
Costs: 4 arms and 3 seeds, 12 minutes on one core; `cost` says how many hours here.
"""

import dataclasses

from experiments.vocabulary import study
from transformer.study.study import Study


def get_study() -> Study:
    found = study(sizes=(512, 4096, 8192), kinds=("bpe",), held="parameters")
    return dataclasses.replace(found, arms={name: arm for name, arm in found.arms.items() if name != "bytes"})
