"""The Compute Engine route of cloud_tpu: the real gcloud against a local stand-in, real sshd as the workers."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from launch.compute import InstanceGroups
from launch.machines import Request
from launch.tpus import parse
from tests.launch.cloud import Bench, gcloud_environment, make_checkout
from tests.launch.fake_compute import Compute
from tests.launch.fake_machines import SSHD

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.skipif(SSHD is None, reason="sshd is not installed"),
    pytest.mark.skipif(not shutil.which("gcloud"), reason="gcloud is not installed"),
]
PIECES = [
    "resourcePolicies/demo",
    "instanceTemplates/demo",
    "instanceGroupManagers/demo-0",
    "instanceGroupManagers/demo-1",
]


@pytest.fixture
def cloud(tmp_path: Path) -> Iterator[Compute]:
    made = Compute(tmp_path / "machines")
    yield made
    made.close()


@pytest.fixture
def bench(cloud: Compute, tmp_path: Path) -> Iterator[Bench]:
    environment = gcloud_environment(tmp_path, "COMPUTE", cloud.url)
    flags = [
        *["--name=demo", "--topology=tpu7x:2x2x2", "--slices=2", "--zone=us-east5-a", "--image=proj/family"],
        *[f"--ssh=ssh -F none -p {cloud.port}", f"--ssh_key={tmp_path}/key", f"--setup={Bench.SETUP}"],
        *["--poll=0.3", "--backoff=0.1", "--project=p"],
    ]
    made = Bench(make_checkout(tmp_path / "checkout"), tmp_path, "cloud_tpu", flags, environment)
    yield made
    made.close()


def test_two_slices_of_two_hosts(cloud: Compute, bench: Bench) -> None:
    assert bench.launch("it's $HOME\n", "--spot") == 0, bench.stderr
    assert sorted(who for who, _, _ in bench.starts) == ["0.0", "0.1", "1.0", "1.1"]
    words = [os.fsencode(word) for word in ("train", "--config=c.py", f"--workdir={bench.out}", "it's $HOME\n")]
    assert all(found == words for _, _, found in bench.starts)
    assert not cloud.objects and not cloud.machines
    assert cloud.calls("POST") == PIECES and sorted(cloud.calls("DELETE")) == sorted(PIECES)
    bodies = {body["name"]: body for method, _, body in cloud.log if method == "POST" and body}
    assert bodies["demo-1"]["targetSize"] == 2 and "workloadPolicy" in bodies["demo-1"]["resourcePolicies"]
    assert bodies["demo"]["properties"]["machineType"] == "tpu7x-standard-4t"
    assert bodies["demo"]["properties"]["scheduling"]["provisioningModel"] == "SPOT"
    for worker in ("0.0", "0.1", "1.0", "1.1"):
        (disk,) = (bench.folder / "machines").glob(f"*-{worker}")
        told = (disk / "home" / ".launch" / "demo" / "new" / "environment").read_text()
        assert f"MEGASCALE_NUM_SLICES=2\nMEGASCALE_SLICE_ID={worker[0]}\n" in told


@pytest.mark.parametrize(
    ("statuses", "state"),
    [
        (["RUNNING", "RUNNING"], "ready"),
        (["RUNNING", "STAGING"], "waiting"),
        (["RUNNING"], "waiting"),
        ([], "waiting"),
        (["RUNNING", "TERMINATED"], "broken"),
        (["STOPPING", "PROVISIONING"], "broken"),
        (["RUNNING", "A NEW WORD"], "broken"),
    ],
)
@pytest.mark.parametrize("missing", ["", "template", "policy", "group"])
def test_what_is_found(monkeypatch: pytest.MonkeyPatch, statuses: list[str], state: str, missing: str) -> None:
    """Anything but all hosts running is not usable; a set with a piece missing is to be made anew."""
    request = Request(name="demo", owner="me", slice=parse("tpu7x:2x2x2"), slices=1, zone="us-east5-a")
    machines = InstanceGroups(request)
    names = {"group": "demo-0", "template": "demo", "policy": "demo"}
    lists = [[] if missing == kind else [{"name": name, "description": machines.mark}] for kind, name in names.items()]
    link = {"networkIP": "10.0.0.1", "accessConfigs": [{"natIP": "1.2.3.4"}]}
    instances = [
        {"name": f"demo-0-{i}x", "status": status, "labels": request.labels, "networkInterfaces": [link]}
        for i, status in enumerate(statuses)
    ]
    other = {"name": "demo-0-zz", "status": "STOPPED", "labels": {}, "networkInterfaces": [link]}
    monkeypatch.setattr("launch.compute.ask_all", lambda commands: lists)
    monkeypatch.setattr("launch.compute.ask", lambda command: [*instances, other])
    found = machines.look()
    assert found.state == ("broken" if missing else state)
    if found.state == "ready":
        assert [(worker.name, worker.address) for worker in found.workers] == [("0.0", "1.2.3.4"), ("0.1", "1.2.3.4")]


@pytest.mark.parametrize("piece", ["global/instanceTemplates/demo", "zones/us-east5-a/instanceGroupManagers/demo-1"])
def test_what_somebody_else_made_is_never_touched(cloud: Compute, bench: Bench, piece: str) -> None:
    link = f"{cloud.url}projects/p/{piece}"
    theirs = {"name": piece.rsplit("/", 1)[1], "description": "mine", "selfLink": link}
    theirs["zone"] = link.rsplit("/", 2)[0]
    cloud.objects[f"projects/p/{piece}"] = theirs
    assert bench.launch() == 2, bench.stderr
    assert not cloud.calls("POST") and not cloud.calls("DELETE")
    assert list(cloud.objects.values()) == [theirs]
