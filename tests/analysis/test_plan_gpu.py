"""plan for GPUs that are not here, by XLA's description of them. The compiling needs JAX's CUDA plugin, and no GPU."""

import dataclasses
import importlib.util
import json
import subprocess
import sys

import pytest

from tests.analysis.test_plan import TINY
from tests.runs.whole import ROOT, run
from transformer.analysis import ahead, plan
from transformer.analysis.chips import CHIPS, topology
from transformer.commands.plan import CUDA
from transformer.config import Experiment
from transformer.errors import UserError
from transformer.parallel.mesh import Mesh
from transformer.settings import override, to_dict

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


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("h100", "'h100' has no sizes; write them as in h100:8"),
        ("h100:2x8", "a slice of h100 has 1 dimension, such as h100:8"),
        ("h100:16", "a machine has up to 8; several are --topology=h100:8 --slices=N"),
        ("h10:8", "'h10' is not a kind of chip that is known (did you mean 'h100'?)"),
    ],
)
def test_topologies_that_are_none(name, says):
    with pytest.raises(UserError) as error:
        topology(name)
    assert says in str(error.value)


def test_the_target_says_what_the_chip_is():
    """The fields that decide what is compiled and what fits."""
    said = " ".join(CHIPS["a100"].target.split())
    assert "cuda_compute_capability { major: 8 minor: 0 }" in said and "core_count: 108" in said
    assert f"device_memory_size: {80 << 30}" in said and "shared_memory_per_block_optin: 166912" in said
    assert said.count("{") == said.count("}")


def test_without_the_plugin_it_is_said(monkeypatch):
    monkeypatch.setattr("transformer.commands.plan.CUDA", ("no_such_plugin",))
    found = run("plan", f"--config={ROOT}/experiments/tiny.py", "--topology=h100:8")
    assert found.status == 2 and found.err.count("\n") == 1
    assert "JAX's CUDA plugin is not installed; install the extra: pip install -e '.[cuda]'" in found.err


@needs_cuda
def test_the_whole_command_for_gpus(tmp_path):
    file = tmp_path / "tiny.py"
    file.write_text(
        "from transformer.config import Experiment\nfrom transformer.settings import from_dict\n"
        f"def get_config():\n    return from_dict(Experiment, {to_dict(TINY)!r})\n"
    )
    command = [sys.executable, "-m", "transformer", "plan", f"--config={file}", "--topology=h100:4", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=300, check=True)
    found = json.loads(done.stdout)
    weights = 2 * 257 * 256 + 5 * 256 + 2 * 12 * 256**2
    assert found["fits"] is True and found["memory"]["chip"] == 80 << 30
    assert found["memory"]["parameters"] == pytest.approx(weights * 4 / 4, rel=0.2)  # the positions besides
    assert found["memory"]["optimizer"] == pytest.approx(2 * found["memory"]["parameters"], rel=1e-3)
    assert {"all-gather", "reduce-scatter"} <= {c["kind"] for c in found["collectives"]}
    assert found["flops"]["step"] == pytest.approx(found["flops"]["model"], rel=0.3)
    assert found["decode"]["fits"] is True and found["decode"]["memory"]["cache"] == 2 * 2 * 256 * 256 * 2
    assert all(line.startswith("compiling") for line in done.stderr.splitlines()), done.stderr


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
    e, where = override(TINY, large), topology("a100:4")
    e = override(e, {"mesh.fsdp": 1, "mesh.data": 4})
    compiled = ahead.compile_ahead(e.program, where, "train", 300)
    assert plan.training(e, where, compiled)["fits"] is False
    nearest = plan.nearest(e, where, 300, lambda line: None)
    assert nearest is not None and nearest["memory"]["peak"] < 80 << 30
