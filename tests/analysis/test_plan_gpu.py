"""plan for GPUs that are not here, by XLA's description of them. The compiling needs JAX's CUDA plugin, and no GPU."""

import dataclasses
import importlib.util

import pytest

from tests.analysis.test_plan import TINY, planned
from tests.runs.whole import ROOT, run
from transformer.analysis import ahead, plan
from transformer.analysis.chips import CHIPS, topology
from transformer.commands.plan import CUDA
from transformer.config import Experiment
from transformer.errors import UserError
from transformer.parallel.mesh import Mesh
from transformer.settings import override

needs_cuda = pytest.mark.skipif(
    not any(map(importlib.util.find_spec, CUDA)), reason="JAX's CUDA plugin is not installed"
)


def test_a_machine_of_gpus_is_a_topology_and_several_are_slices():
    where = topology("h100:8", 2)
    assert (where.devices, where.chips, where.slices, where.chip.platform) == (16, 16, 2, "gpu")
    assert {chip.platform for name, chip in CHIPS.items() if name.startswith(("v", "tpu"))} == {"tpu"}
    for mesh in (Mesh(fsdp=16), Mesh(slice=2, fsdp=8)):  # over the slow network as over the fast one, or apart
        plan.check_mesh(Experiment(mesh=mesh), where)
    with pytest.raises(UserError, match=r"mesh.slice: 4, and there are 2 slices"):
        plan.check_mesh(Experiment(mesh=Mesh(slice=4, fsdp=4)), where)


def test_the_target_says_what_the_chip_is():
    """The fields that decide what is compiled and what fits."""
    said = " ".join(CHIPS["a100"].target.split())
    assert "cuda_compute_capability { major: 8 minor: 0 }" in said and "core_count: 108" in said
    assert f"device_memory_size: {60 << 30}" in said and "shared_memory_per_block_optin: 166912" in said
    assert said.count("{") == said.count("}")


def test_of_a_gpus_memory_there_is_what_jax_takes(monkeypatch):
    assert CHIPS["h100"].available == 60 << 30 and CHIPS["v5e"].available == 16 << 30
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9")
    assert CHIPS["h100"].available == pytest.approx(72 << 30) and CHIPS["v5e"].available == 16 << 30
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", "")
    assert CHIPS["h100"].available == pytest.approx(72 << 30)
    for share in ("most", "nan", "-1", "0", "inf"):
        monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", share)
        with pytest.raises(UserError, match=f"XLA_CLIENT_MEM_FRACTION: '{share}' is not a part"):
            CHIPS["h100"].available  # noqa: B018


def test_without_the_plugin_it_is_said(monkeypatch):
    monkeypatch.setattr("transformer.commands.plan.CUDA", ("no_such_plugin",))
    found = run("plan", f"--config={ROOT}/experiments/tiny.py", "--topology=h100:8")
    assert found.status == 2 and found.err.count("\n") == 1
    assert "JAX's CUDA plugin is not installed; install the extra: pip install -e '.[cuda]'" in found.err


@needs_cuda
def test_the_whole_command_for_gpus(tmp_path):
    found = planned(tmp_path, "h100:4")
    assert found["memory"]["chip"] == 60 << 30
    assert {"all-gather", "reduce-scatter"} <= {c["kind"] for c in found["collectives"]}
    assert found["flops"]["step"] == pytest.approx(found["flops"]["model"], rel=0.3)


@needs_cuda
def test_between_machines_go_gradients_alone():
    where = topology("h100:2", 2)
    e = dataclasses.replace(TINY, mesh=Mesh(slice=2, fsdp=2))
    found = plan.training(e, where, ahead.compile_ahead(e.program, where, "train", 300))
    across = {c["kind"] for c in found["collectives"] if c["between_slices"]}
    assert across == {"all-reduce"}
    assert found["times"]["between_slices"] > 0 and found["times"]["network"] > 0


@needs_cuda
def test_what_does_not_fit_on_a_gpu_says_what_would():
    large = {"model.depth": 32, "model.width": 4096, "model.heads": 32, "model.context": 2048, "train.batch": 4}
    e, where = override(TINY, large | {"mesh.fsdp": 1, "mesh.data": 4}), topology("a100:4")
    compiled = ahead.compile_ahead(e.program, where, "train", 300)
    assert plan.training(e, where, compiled)["fits"] is False
    nearest = plan.nearest(e, where, 300, lambda line: None)
    assert nearest is not None and nearest["memory"]["peak"] < 60 << 30
