"""plan: reading compiled programs, the table of chips, and, where libtpu is installed, real compilations for TPUs."""

import importlib.util
import json
import os
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from tests import small
from tests.runs.whole import ROOT
from transformer.analysis import hlo
from transformer.analysis.ahead import products
from transformer.analysis.chips import CHIPS, topology
from transformer.analysis.cost import forward_flops
from transformer.errors import UserError
from transformer.parallel.mesh import Mesh
from transformer.training.step import sum_gradients

PROGRAM = """HloModule jit_f

%body.1 (p: (s32[], f32[4,8])) -> (s32[], f32[4,8]) {
  %p = (s32[], f32[4,8]{1,0}) parameter(0)
  %x = f32[4,8]{1,0} get-tuple-element(%p), index=1
  %gathered = bf16[16,8]{1,0} all-gather(%x), channel_id=1, replica_groups={{0,1,2,3},{4,5,6,7}}, dimensions={0}
  ROOT %t = (s32[], f32[4,8]{1,0}) tuple(%i, %x)
}

%condition.1 (p.1: (s32[], f32[4,8])) -> pred[] {
  %p.1 = (s32[], f32[4,8]{1,0}) parameter(0)
  %i.1 = s32[] get-tuple-element(%p.1), index=0
  %twelve = s32[] constant(12)
  ROOT %less = pred[] compare(%i.1, %twelve), direction=LT
}

ENTRY %main.9 (a: f32[4,8]) -> f32[4,8] {
  %a = f32[4,8]{1,0} parameter(0)
  %loop = (s32[], f32[4,8]{1,0}) while(%a), condition=%condition.1, body=%body.1
  %sum = f32[4,8]{1,0} all-reduce(%a), channel_id=2, replica_groups=[1,8]<=[8], to_apply=%add
  %alone = f32[4,8]{1,0} all-reduce(%a), channel_id=3, replica_groups=[8,1]<=[8], to_apply=%add
  ROOT %out = f32[4,8]{1,0} get-tuple-element(%loop), index=1
}
"""


def test_collectives_of_a_loop_count_as_often_as_it_goes_round() -> None:
    """Twelve gathers of 16 x 8 bfloat16 over four devices, and one sum of 4 x 8 float32 over both slices; by hand."""
    found = {c.kind: c for c in hlo.collectives(*hlo.parse(PROGRAM), devices=8, slices=2)}
    assert set(found) == {"all-gather", "all-reduce"}
    gather, total = found["all-gather"], found["all-reduce"]
    assert (gather.times, gather.size, gather.devices, gather.across) == (12, 16 * 8 * 2, 4, False)
    assert gather.moved == 16 * 8 * 2 * 3 / 4
    assert (total.times, total.size, total.devices, total.across) == (1, 4 * 8 * 4, 8, True)
    assert total.moved == 2 * 4 * 8 * 4 * 7 / 8


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("replica_groups={{0,2},{1,3}}", [[0, 2], [1, 3]]),
        ("replica_groups=[2,2]<=[4]", [[0, 1], [2, 3]]),
        ("replica_groups=[2,2]<=[2,2]T(1,0)", [[0, 2], [1, 3]]),
        ("replica_groups=mesh['a'=2,'b'=2] {'a'}", [[0, 2], [1, 3]]),
        ("replica_groups=mesh['a'=2,'b'=2], device_ids=([2,2]T(1,0)) {'a'}, x", [[0, 1], [2, 3]]),
        ("source_target_pairs={{0,1},{1,0}}", [[0, 1], [1, 0]]),
        ("nothing", [[0, 1, 2, 3]]),
    ],
)
def test_groups_of_devices(text: str, groups: Any) -> None:
    assert hlo.groups(text, 4).tolist() == groups


@pytest.mark.parametrize("stack", ["scan", "unroll"])
def test_products_of_the_training_step_are_those_of_the_formula(stack: Any) -> None:
    """Three times the forward pass; scanned or written out, and the plain kernel's tables of a whole context."""
    e = small.experiment(stack=stack, depth=3, vocab=64, width=32)
    traced = jax.jit(lambda s, b: sum_gradients(e, s, b)).trace(
        small.state(e), jax.tree.map(jnp.asarray, small.batch(e))
    )
    tokens = e.train.batch * e.model.context
    assert products(traced.jaxpr.jaxpr) == pytest.approx(3 * tokens * sum(forward_flops(e).values()), rel=1e-6)


@pytest.mark.parametrize(
    ("name", "slices", "message"),
    [
        ("v5x:4x4", 1, "'v5x' is not a kind of chip that is known .did you mean 'v5"),
        ("v5e", 1, "no sizes; write them as in v5e:4x4"),
        ("v5e:4x4x4", 1, "has 2 dimensions"),
        ("v4:4x4", 1, "has 3 dimensions"),
        ("v5e:64x64", 1, "4096 chips; plan goes up to 1024"),
        ("v5e:0x4", 1, "no sizes"),
        ("v5e:4x4", 0, "--slices: 0"),
    ],
)
def test_a_topology_that_is_none_is_refused(name: str, slices: int, message: str) -> None:
    with pytest.raises(UserError, match=message):
        topology(name, slices)


def test_chips_and_devices() -> None:
    assert (topology("v5e:16x16", 2).chips, topology("v5e:16x16", 2).devices) == (512, 512)
    assert (topology("v4:2x2x4").chips, topology("v4:2x2x4").devices) == (16, 32)
    assert {name: chip.memory >> 30 for name, chip in CHIPS.items()} == {
        "v4": 32, "v5e": 16, "v5p": 95, "v6e": 32, "tpu7x": 192,
    }  # fmt: skip


def plan(*changes: str) -> tuple[int, Any, str]:
    """The command as a user types it, on a machine without a TPU."""
    command = [
        sys.executable,
        "-m",
        "transformer",
        "plan",
        "--config=experiments/plan_reference.py",
        "--json",
        *changes,
    ]
    environment = os.environ | {"ALLOW_MULTIPLE_LIBTPU_LOAD": "true"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=400)
    return done.returncode, json.loads(done.stdout) if done.returncode == 0 else None, done.stderr


NO_LIBTPU = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")
SMALL = ("--config.model.width=256", "--config.model.heads=2", "--config.model.mlp.width=512", "--config.model.depth=2")
SMALL += ("--config.tokenizer.vocab_size=1024", "--config.model.context=256")


@NO_LIBTPU
def test_a_small_model_on_four_chips() -> None:
    status, found, err = plan("--topology=v5e:2x2", "--config.mesh.fsdp=4", "--config.train.batch=4", *SMALL)
    assert status == 0, err
    assert found["fits"] and found["tokens_per_second"] > 0
    assert not [line for line in err.splitlines() if "compiling" not in line], "nothing else is said"


@NO_LIBTPU
def test_a_mesh_of_another_size_is_refused_in_one_line() -> None:
    status, _, err = plan("--topology=v5e:2x2", "--config.mesh.fsdp=8", "--config.train.batch=8", *SMALL)
    assert status == 2 and err.splitlines()[-1].startswith("error: ") and "Traceback" not in err


@NO_LIBTPU
@pytest.mark.parametrize("mesh", [Mesh(slice=2, fsdp=2), Mesh(context=4), Mesh(data=2, tensor=2)], ids=str)
@pytest.mark.exhaustive
def test_every_mesh_compiles(mesh: Mesh) -> None:
    """Windows and soft caps by the TPU's own kernel; what it cannot do by ours."""
    axes = [f"--config.mesh.{name}={getattr(mesh, name)}" for name in ("slice", "data", "fsdp", "context", "tensor")]
    where = ["--topology=v5e:1x2", "--slices=2"] if mesh.slice > 1 else ["--topology=v5e:2x2"]
    span = ("--config.model.attention.span=sliding", "--config.model.attention.span.window=100")
    status, found, err = plan(*where, *axes, "--config.train.batch=4", *SMALL, *span)
    assert status == 0, err
    assert found["fits"]
