"""Do more weights help where a token goes through no more of them? A mixture of experts against a dense MLP.

    python -m transformer study --config=experiments/mixture.py --workdir=runs/mixture

Every arm takes the FLOPs of the dense model to 1 %: an expert is as wide as the dense MLP shared out over the experts
that a token goes through. The mixtures have more weights, which is the question.

Expected: not known yet; a verdict on each mixture against the dense model.
Costs: 12 runs for the learning rates and 15 for the verdicts; `cost` says how many hours here. Not run yet.
"""

from transformer.config import Experiment
from transformer.data.prepare import Data
from transformer.data.tokenizer import Bpe
from transformer.model.config import Model
from transformer.model.mlp import Swiglu
from transformer.study.study import Study
from transformer.training.config import Train
from transformer.training.optimizer import Muon


def get_study() -> Study:
    return Study(
        question="At equal FLOPs, does a mixture of experts model text better than a dense MLP?",
        baseline=Experiment(
            model=Model(depth=4, width=128, heads=4, context=256, mlp=Swiglu()),
            tokenizer=Bpe(vocab_size=2048),
            data=Data(source="shakespeare"),
            train=Train(
                steps=300, batch=8, learning_rate=5e-3, warmup=30, optimizer=Muon(), eval_every=50, eval_windows=64
            ),
        ),
        arms={
            "8 experts, 2 for a token": {"model.mlp": "moe"},
            "8 experts, 1 for a token, 1 shared": {
                "model.mlp": "moe",
                "model.mlp.top_k": 1,
                "model.mlp.shared": 1,
                "model.mlp.normalise": False,
            },
        },
        equal="flops_by_width",
        accept=("parameters", "block_parameters"),  # the question
        learning_rates=(5e-3, 1e-2, 2e-2, 4e-2),
        budget_hours=3,
    )
