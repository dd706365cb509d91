"""How much memory does a well-known model take on a pod, by our step and by MaxText's? Nothing is trained.

    python -m transformer plan --config=experiments/plan_reference.py --topology=v5e:16x16

Expected: the table of docs/scaling.md, which has three more configurations and the same by MaxText.
Costs: half a minute; needs the extra `plan`, and no TPU.
"""

from transformer.config import Experiment
from transformer.data.tokenizer import Bpe
from transformer.model.config import Model
from transformer.model.mlp import Swiglu
from transformer.model.norms import RmsNorm
from transformer.model.positions import Rotary
from transformer.parallel.mesh import Mesh
from transformer.training.config import Train


def get_config() -> Experiment:
    return Experiment(
        model=Model(
            depth=12,
            width=2048,
            heads=16,
            context=2048,
            positions=Rotary(),
            norm=RmsNorm(),
            mlp=Swiglu(width=8192),
            dtype="bfloat16",
            remat="full",
        ),
        tokenizer=Bpe(vocab_size=32_000),
        train=Train(batch=256),
        mesh=Mesh(fsdp=256),
    )
