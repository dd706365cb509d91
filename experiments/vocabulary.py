"""How large should the vocabulary be, and of which kind? Bytes, and 512 to 16,384 entries, unigram and BPE.

    python -m transformer study --config=experiments/vocabulary.py --workdir=runs/vocabulary
    python -m transformer study --config=experiments/vocabulary.py --workdir=runs/vocab_flops --equal=flops_by_steps
    python -m transformer study --config=experiments/vocabulary_parameters.py --workdir=runs/vocabulary_parameters

The first reads equal bytes of text with every vocabulary, the second computes equally much, the third has equally many
weights. All are measured in bits per byte, so that vocabularies compare. The report has the ranking through the
training, and the share of each arm's weights that is in the two tables.

Expected: 8,192 entries are best or nearly so by each measure; bytes are as good as 2,048 entries at equal bytes and
the worst at equal FLOPs (docs/results/vocabulary.md).
Costs: 13 arms, 3 seeds, no tuning: all have the learning rate that is best for 2,048 entries. `cost` says how many
hours here. Where 3 hours do not pay for it, sizes are left out, not seeds: the largest first.
"""

from collections.abc import Sequence

from transformer.config import Experiment
from transformer.data.prepare import Data
from transformer.data.tokenizer import Bpe
from transformer.model.config import Model
from transformer.study.equal import Held
from transformer.study.study import Study
from transformer.training.config import Train
from transformer.training.optimizer import Muon

BASE = 2048
SIZES = (512, 1024, 4096, 8192, 16384)  # the smallest first: what does not fit is dropped from the end


def study(
    *, sizes: Sequence[int] = SIZES, base: int = BASE, kinds: Sequence[str] = ("bpe", "unigram"), held: Held = "bytes"
) -> Study:
    """The study of some sizes, beside ``base`` entries of BPE."""
    arms: dict[str, dict[str, object]] = {"bytes": {"tokenizer": "bytes"}}
    arms |= {f"{kind} {base}": {"tokenizer": kind, "tokenizer.vocab_size": base} for kind in kinds if kind != "bpe"}
    for size in sizes:
        arms |= {f"{kind} {size}": {"tokenizer": kind, "tokenizer.vocab_size": size} for kind in kinds}
    return Study(
        question="Which vocabulary gives the best language model, in bits per byte?",
        baseline=Experiment(
            model=Model(depth=4, width=128, heads=4, context=256),
            tokenizer=Bpe(vocab_size=base),
            data=Data(source="shakespeare"),
            train=Train(
                steps=300, batch=8, learning_rate=1e-2, warmup=30, optimizer=Muon(), eval_every=50, eval_windows=64
            ),
        ),
        arms=arms,
        seeds=(0, 1, 2),
        equal=held,
        accept=("steps", "tokens", "bytes", "parameters", "block_parameters", "flops"),  # a vocabulary changes them all
        budget_hours=3,
    )


def get_study() -> Study:
    return study()
