"""A job that was given an accelerator and does not find it ends: what JAX_PLATFORMS asks for first, or an error."""

import io
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from launch.job import Job
from launch.slurm_script import make_plan, script
from launch.workers import Bundle
from tests.launch.test_gke import POOLS, manifest
from tests.launch.test_slurm_script import DEFAULTS


@pytest.mark.skipif(Path("/dev/nvidia0").exists(), reason="this machine has a GPU")
@pytest.mark.parametrize(
    ("platforms", "command", "file"),
    [
        ("cuda,cpu", "train", "tiny"),
        ("cuda", "train", "tiny"),
        ("tpu,cpu", "train", "tiny"),
        ("cuda,cpu", "study", "planted"),
    ],
)
def test_V01_what_is_asked_for_and_not_there_is_an_error(
    platforms: str, command: str, file: str, tmp_path: Path
) -> None:
    """In the program itself: JAX takes the CPU in place of `cuda,cpu`."""
    root = Path(__file__).parents[2]
    words = [command, f"--config={root}/experiments/{file}.py", f"--workdir={tmp_path / 'run'}"]
    ended = subprocess.run(
        [sys.executable, "-m", "transformer", *words],
        env=os.environ | {"JAX_PLATFORMS": platforms, "PYTHONPATH": str(root), "TPU_SKIP_MDS_QUERY": "1"},
        capture_output=True,
        text=True,
    )
    asked = platforms.partition(",")[0]
    assert ended.returncode == 2
    assert ended.stderr.splitlines()[-1].startswith(f"error: JAX_PLATFORMS: {asked} is asked for and JAX finds ")
    assert "Traceback" not in ended.stderr and not (tmp_path / "run").exists()


def test_V01_a_tpu_vm_wants_its_tpu() -> None:
    sent = Bundle(code=b"", digest="", arguments=b"", setup="").packed({"MEGASCALE_SLICE_ID": "1"})
    with tarfile.open(fileobj=io.BytesIO(sent)) as tar:
        file = tar.extractfile("environment")
        assert file and file.read().splitlines() == [b"JAX_PLATFORMS=tpu,cpu", b"MEGASCALE_SLICE_ID=1"]


@pytest.mark.parametrize(("name", "platforms"), [("tpu", "tpu,cpu"), ("gpu", "cuda,cpu")])
def test_V01_a_pod_wants_its_accelerator(name: str, platforms: str) -> None:
    (work,) = manifest(POOLS[name])["spec"]["replicatedJobs"]
    (container,) = work["template"]["spec"]["template"]["spec"]["containers"]
    assert {"name": "JAX_PLATFORMS", "value": platforms} in container["env"]


@pytest.mark.parametrize(
    ("gpus", "set_by_user", "found"),
    [
        ("2", None, "cuda,cpu"),
        ("2", "rocm,cpu", "rocm,cpu"),
        ("2", "cpu", "cuda,cpu"),
        ("0", None, ""),
        ("0", "cpu", "cpu"),
    ],
)
def test_V01_a_job_on_gpus_wants_them(gpus: str, set_by_user: str | None, found: str) -> None:
    job = Job(name="j", arguments=("train",))
    lines = script(make_plan(job), job, {**DEFAULTS, "gpus_per_node": gpus}).splitlines()
    exports = [line for line in lines if "export JAX_PLATFORMS" in line]
    given = {} if set_by_user is None else {"JAX_PLATFORMS": set_by_user}
    command = ["bash", "-c", "\n".join([*exports, 'echo "$JAX_PLATFORMS"'])]
    said = subprocess.run(command, env={"PATH": "/usr/bin:/bin", **given}, capture_output=True, text=True, check=True)
    assert said.stdout.strip() == found
