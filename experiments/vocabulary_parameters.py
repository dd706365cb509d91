"""Is a larger vocabulary worth its weights? Four sizes of BPE at equal parameters: what tables take, blocks lack.

    python -m transformer study --config=experiments/vocabulary_parameters.py --workdir=runs/vocabulary_parameters

The width is solved for; the steps are equal, so a larger vocabulary reads more text in them. vocabulary.py has the
studies at equal bytes and at equal FLOPs.

Expected: not known yet; a verdict on each against 2,048 entries.
Costs: 4 arms and 3 seeds; `cost` says how many hours here. Not run to its end yet.
"""

import dataclasses

from experiments.vocabulary import study
from transformer.study.study import Study


def get_study() -> Study:
    found = study(sizes=(512, 4096, 8192), kinds=("bpe",), held="parameters")
    return dataclasses.replace(found, arms={name: arm for name, arm in found.arms.items() if name != "bytes"})
