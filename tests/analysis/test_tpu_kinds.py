"""Every kernel, kind of attention and mixture of experts compiles for TPUs that are not here, to the chips' own code.

Forward and backward in the training step, and in the step that generates a token. The shapes in the chips' code tell
kernels of linear memory from the one that writes out the table of scores.
"""

import importlib.util
import re
from typing import Any

import pytest

from transformer import config
from transformer.analysis import plan
from transformer.analysis.ahead import compile_ahead
from transformer.analysis.chips import topology
from transformer.config import Experiment
from transformer.data.tokenizer import Bytes
from transformer.model.config import Model
from transformer.parallel.mesh import Mesh
from transformer.settings import override
from transformer.training.config import Train

pytestmark = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")

BASE = Experiment(
    model=Model(depth=2, width=256, heads=2, context=2048, stack="scan", dtype="bfloat16"),
    tokenizer=Bytes(),
    train=Train(batch=4, steps=10, warmup=1),
    mesh=Mesh(fsdp=4),
)
ROW = 2 * 2048**2 * 4  # bytes of a block's scores of one row
TOPOLOGIES = {"v5e": {4: "v5e:2x2", 1: "v5e:1x1"}, "tpu7x": {4: "tpu7x:1x1x2"}}
OF = "model.attention"
SPLASH, BLOCKWISE, PLAIN, NONE = "splash", "blockwise", "plain", "none"

# What is changed, and the kernel that trains it.
CASES: dict[str, tuple[dict[str, Any], str]] = {
    "auto": ({}, SPLASH),
    "splash": ({f"{OF}.kernel": "splash"}, SPLASH),
    "blockwise": ({f"{OF}.kernel": "blockwise"}, BLOCKWISE),
    "blockwise, short": ({f"{OF}.kernel": "blockwise", "model.context": 512}, BLOCKWISE),
    "plain": ({f"{OF}.kernel": "plain"}, PLAIN),
    "multi-query": ({f"{OF}.projection": "multi_query"}, SPLASH),
    "grouped": ({f"{OF}.projection": "grouped", "model.heads": 4, f"{OF}.kernel": "splash"}, SPLASH),
    "latent": ({f"{OF}.projection": "latent", "model.positions": "rotary"}, SPLASH),
    "latent, blockwise": ({f"{OF}.projection": "latent", f"{OF}.kernel": "blockwise"}, BLOCKWISE),
    "latent, plain": ({f"{OF}.projection": "latent", f"{OF}.kernel": "plain"}, PLAIN),
    "differential": ({f"{OF}.projection": "differential", f"{OF}.value_residual": "learned"}, SPLASH),
    "differential, blockwise": ({f"{OF}.projection": "differential", f"{OF}.kernel": "blockwise"}, BLOCKWISE),
    "linear": ({f"{OF}.projection": "linear", f"{OF}.value_residual": "fixed", f"{OF}.gate": True}, NONE),
    "value residual": ({f"{OF}.value_residual": "learned"}, SPLASH),
    "sinks": ({f"{OF}.scores.sinks": True}, BLOCKWISE),
    "soft cap": ({f"{OF}.scores.soft_cap": 30.0, "model.logits_soft_cap": 30.0}, SPLASH),
    "soft cap, blockwise": ({f"{OF}.scores.soft_cap": 30.0, f"{OF}.kernel": "blockwise"}, BLOCKWISE),
    "sigmoid": ({f"{OF}.scores": "sigmoid"}, PLAIN),
    "alibi": ({"model.positions": "alibi"}, BLOCKWISE),
    "relative": ({"model.positions": "relative"}, PLAIN),
    "sliding": ({f"{OF}.span": "sliding", f"{OF}.qk_norm": "head"}, SPLASH),
    "chunked": ({f"{OF}.span": "chunked"}, BLOCKWISE),
    "pattern": ({f"{OF}.span": "pattern", f"{OF}.projection": "latent"}, SPLASH),
    "experts, one device": ({"model.mlp": "moe", "mesh.fsdp": 1, "train.batch": 1}, SPLASH),
    "experts, fsdp": ({"model.mlp": "moe", "model.mlp.shared": 1}, SPLASH),
    "experts, cut": ({"model.mlp": "moe", "mesh.fsdp": 2, "mesh.expert": 2}, SPLASH),
}
EACH = [(chips, name) for chips in TOPOLOGIES for name in CASES if name != "experts, one device" or chips == "v5e"]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("chips", "name"), EACH)
def test_it_compiles_for_a_tpu(chips: str, name: str) -> None:
    compiles(chips, name, code=True)


def test_a_mixture_with_the_tpu_s_kernel_compiles() -> None:
    compiles("v5e", "experts, cut", code=False)


def compiles(chips: str, name: str, code: bool) -> None:
    changes, kernel = CASES[name]
    e = override(BASE, changes)
    config.check(e, given=changes)
    where = topology(TOPOLOGIES[chips][4 if name != "experts, one device" else 1])
    plan.check_mesh(e, where)
    trained = compile_ahead(e.program, where, "train", 900, code)
    assert trained.fits
    assert ("splash_mqa_dkv" in trained.text) == (kernel == SPLASH), "by another kernel"
    tables = re.findall(rf"\w+\[[\d,]*{e.model.context},{e.model.context}\]", trained.text)
    assert bool(tables) == (kernel == PLAIN), f"a table of scores is written out, or is not: {tables[:3]}"
    generated = compile_ahead(plan.generating(e).program, where, "decode", 900, code)
    assert generated.fits and "cache" in generated.parts
    # A mixture cut over devices gathers its weights: 5.5 MB on tpu7x.
    assert generated.temporaries < ROW / (4 if "experts" in name else 8)
