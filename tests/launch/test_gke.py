"""python -m launch gke: the real kubectl against a local stand-in for a cluster, its pods as local processes."""

import base64
import hashlib
import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest

from launch.arguments import refuse_what_would_be_lost
from launch.errors import UserError
from launch.gke import decisive
from launch.job import Job
from launch.jobset import PARTS, Pool, code_maps, jobset
from launch.tpus import parse
from launch.workers import Bundle
from tests.launch.cloud import Bench, make_checkout, wait_until
from tests.launch.fake_kube import Cluster, expand, unknown_fields

needs_kubectl = pytest.mark.skipif(not shutil.which("kubectl"), reason="kubectl is not installed")
NAME = "demo"
AWKWARD = ["a;b", "x,y", "it's", "$HOME", "$(HOME)", "$$(HOME)", "$$", "$JOB_COMPLETION_INDEX", "$(LAUNCH_FILES)"]
AWKWARD += ["a b", "line\nbreak", "", "*", "~", 'say "hi"', "\\", "é", "--", "{}", "- x"]

TPU = Pool(tpu=parse("v5e:2x4"), slices=2)
POOLS = {
    "tpu": Pool(tpu=parse("v6e:4x8"), slices=3, spot=True),
    "one tpu host": Pool(tpu=parse("tpu7x:2x2x1")),
    "gpu": Pool(gpu="nvidia-h100-80gb", gpus=8, hosts=4),
    "one gpu host": Pool(gpu="nvidia-l4", gpus=1),
}


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkout(tmp_path_factory.mktemp("checkout"))


Start = Callable[..., tuple[Cluster, Bench]]


@pytest.fixture
def start(checkout: Path, tmp_path: Path) -> Iterator[Start]:
    opened: list[Cluster | Bench] = []

    def make(*pool: str) -> tuple[Cluster, Bench]:
        cluster = Cluster(tmp_path / "pods")
        server = f"http://127.0.0.1:{cluster.server.server_port}"
        context = {"name": "c", "context": {"cluster": "c", "user": "u"}}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "c", "cluster": {"server": server}}],
            "users": [{"name": "u", "user": {}}],
            "contexts": [context],
            "current-context": "c",
        }
        (tmp_path / "kubeconfig").write_text(json.dumps(config))
        environment = {"KUBECONFIG": str(tmp_path / "kubeconfig"), "HOME": str(tmp_path)}
        flags = [f"--name={NAME}", "--image=i", "--poll=0.2", f"--setup={Bench.SETUP}"]
        bench = Bench(checkout, tmp_path, "gke", [*flags, *(pool or ("--gpu=nvidia-l4", "--hosts=2"))], environment)
        opened.extend([bench, cluster])
        return cluster, bench

    yield make
    for each in opened:
        each.close()


def nothing_left(cluster: Cluster) -> bool:
    return not cluster.objects and all(process.poll() is not None for process in cluster.processes.values())


@needs_kubectl
def test_two_slices_of_two_hosts_run_the_exact_code_with_the_exact_arguments(start: Start) -> None:
    cluster, bench = start("--topology=v5p:2x2x2", "--slices=2")
    assert bench.launch(*AWKWARD) == 0, bench.stderr
    assert sorted(who for who, _, _ in bench.starts) == ["0.0", "0.1", "1.0", "1.1"]
    expected = ["train", "--config=c.py", f"--workdir={bench.out}", *AWKWARD]
    assert all(words == [os.fsencode(word) for word in expected] for _, _, words in bench.starts)
    for host in ("0.0", "1.1"):
        lines = [line for line in bench.stdout.splitlines() if line.startswith(f"{host}: ")]
        assert lines == [f"{host}: {text}" for text in ("step 1", "step 2", "step 3", "all done")]
    odd = list(bench.folder.glob("pods/*/tmp.*/code/odd name\n"))
    assert [path.read_text() for path in odd] == ["not committed"] * 4
    assert nothing_left(cluster)


@needs_kubectl
def test_gpu_hosts_are_told_of_each_other(start: Start) -> None:
    _, bench = start("--gpu=nvidia-h100-80gb", "--hosts=2")
    assert bench.launch("a b") == 0, bench.stderr
    told = {who: [word.decode() for word in words[-4:]] for who, _, words in bench.starts}
    both = ["a b", f"--coordinator={NAME}-host-0-0.{NAME}:8476", "--processes=2"]
    assert told == {f"0.{i}": [*both, f"--process={i}"] for i in range(2)}


@needs_kubectl
@pytest.mark.parametrize(
    ("status", "starts"),
    [
        (2, 1),
        pytest.param(137, 3, marks=pytest.mark.exhaustive),
        pytest.param(143, 3, marks=pytest.mark.exhaustive),
    ],
)
def test_exit_status_decides(start: Start, status: int, starts: int) -> None:
    cluster, bench = start()
    bench.want(steps=10_000, after=2, end=status, who="0.1")
    assert bench.launch("--attempts=3") == status, bench.stderr
    assert [begin for who, begin, _ in bench.starts if who == "0.1"] == [0, 2, 4][:starts]
    assert nothing_left(cluster)


@pytest.mark.parametrize(
    ("ends", "status"),
    [
        ([], 1),
        ([("12:00:01Z", 0)], 1),
        ([("12:00:02Z", 1), ("12:00:01Z", 137)], 137),
        ([("12:00:01Z", 1), ("12:00:01Z", 137)], 137),
        ([("12:00:01Z", 1), ("12:00:02Z", 143)], 1),
        ([("12:00:01Z", 137), ("12:00:02Z", 2)], 2),
    ],
)
def test_what_failed_first_decides(ends: list[tuple[str, int]], status: int) -> None:
    assert decisive(ends) == status == decisive(ends[::-1])


def test_a_directory_that_would_be_lost_is_refused() -> None:
    for words in (["--workdir=runs/a"], ["--workdir", "a"]):
        with pytest.raises(UserError, match=r"--workdir: '.*a' would be on the machines and deleted with them"):
            refuse_what_would_be_lost(Job(name="a", arguments=("train", *words)))
    for words in ([], ["--workdir=gs://bucket/a"], ["--workdir=/mnt/a"]):
        refuse_what_would_be_lost(Job(name="a", arguments=("train", *words)))


@needs_kubectl
def test_a_lost_host_starts_all_anew_from_their_last_step(start: Start) -> None:
    cluster, bench = start()
    bench.want(steps=10_000)
    process = bench.start()
    wait_until(lambda: "0.1: step 3\n" in bench.stdout)
    bench.want(steps=1)
    with cluster.lock:
        pod = next(name for name in cluster.processes if name.startswith(f"{NAME}-host-0-1"))
        os.killpg(cluster.processes[pod].pid, signal.SIGKILL)
    assert process.wait(timeout=30) == 0, bench.stderr
    assert len(bench.starts) == 4 and min(begin for _, begin, _ in bench.starts[2:]) >= 2
    assert "restart 1" in bench.stderr and nothing_left(cluster)


@needs_kubectl
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_nothing_behind(start: Start, number: signal.Signals) -> None:
    cluster, bench = start()
    bench.want(steps=10_000)
    process = bench.start()
    wait_until(lambda: "0.1: step 3\n" in bench.stdout)
    os.killpg(process.pid, number)
    assert process.wait(timeout=30) == 128 + number, bench.stderr
    assert nothing_left(cluster) and "Traceback" not in bench.stderr


@needs_kubectl
def test_status_logs_stop_and_a_second_launch(start: Start) -> None:
    cluster, bench = start()
    assert bench.launch(action="stop") == 0 and bench.launch(action="logs") == 1
    bench.want(steps=10_000)
    first = bench.start()
    wait_until(lambda: "0.1: step 3\n" in bench.stdout)
    first.kill()
    first.wait()
    assert bench.launch("--other") == 2 and "other" in bench.stderr
    second = bench.start()
    wait_until(lambda: bench.stdout.count("0.1: step 3\n") == 2)
    assert bench.launch(action="status") == 0
    assert f"{NAME}: not ended, 0 restarts; pods: 2 Running" in bench.stdout
    assert bench.launch(action="stop") == 0, bench.stderr
    assert second.wait(timeout=30) == 1 and "deleted by someone else" in bench.stderr
    assert len(bench.starts) == 2 and nothing_left(cluster)


@needs_kubectl
def test_what_somebody_else_made_is_never_touched(start: Start) -> None:
    cluster, bench = start()
    labels = {"launch-name": NAME, "launch-owner": "somebody-else"}
    theirs = {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "status": {"terminalState": "Failed"}}
    cluster.objects["jobsets", NAME] = {**theirs, "metadata": {"name": NAME, "labels": labels}}
    for action in ("", "stop", "status", "logs"):
        assert bench.launch(action=action) == 2
    assert bench.stderr.count("--name") == 4 and {method for method, _ in cluster.log} == {"GET"}


@needs_kubectl
def test_keep_leaves_the_jobset_and_its_logs(start: Start) -> None:
    cluster, bench = start()
    assert bench.launch("--keep") == 0, bench.stderr
    assert ("jobsets", NAME) in cluster.objects
    assert bench.launch(action="logs") == 0 and bench.stdout.count("0.0: all done\n") == 2
    assert bench.launch("--keep") == 0 and len(bench.starts) == 2  # has ended well: not run again
    assert bench.launch(action="stop") == 0 and nothing_left(cluster)


@pytest.mark.parametrize("name", POOLS)
def test_manifests_are_what_kubernetes_takes(name: str) -> None:
    """JobSet's own fields by our table, the Job below by Kubernetes' own schema."""
    made = manifest(POOLS[name])
    assert not unknown_fields(made)
    made["spec"]["failurePolicy"]["maxRestart"] = 1
    assert unknown_fields(made) == ["spec.failurePolicy.maxRestart"]
    work = made["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert work["podFailurePolicy"]["rules"] and work["template"]["spec"]["restartPolicy"] == "Never"
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, "spec": work}
    kubernetes_validate.validate(job, "1.29", strict=True)


@pytest.mark.parametrize(
    ("name", "selector", "devices", "hosts"),
    [
        ("tpu", {"gke-tpu-accelerator": "tpu-v6e-slice", "gke-tpu-topology": "4x8"}, {"google.com/tpu": "4"}, 8),
        ("one tpu host", {"gke-tpu-accelerator": "tpu7x", "gke-tpu-topology": "2x2x1"}, {"google.com/tpu": "4"}, 1),
        ("gpu", {"gke-accelerator": "nvidia-h100-80gb"}, {"nvidia.com/gpu": "8"}, 4),
        ("one gpu host", {"gke-accelerator": "nvidia-l4"}, {"nvidia.com/gpu": "1"}, 1),
    ],
)
def test_nodes_asked_for(name: str, selector: dict[str, str], devices: dict[str, str], hosts: int) -> None:
    (work,) = manifest(POOLS[name])["spec"]["replicatedJobs"]
    pod = work["template"]["spec"]["template"]["spec"]
    found = {key.partition("/")[2]: value for key, value in pod["nodeSelector"].items()}
    assert found == selector | ({"gke-spot": "true"} if POOLS[name].spot else {})
    assert pod["containers"][0]["resources"]["limits"] == devices
    assert work["template"]["spec"]["completions"] == hosts and work["replicas"] == POOLS[name].slices


def test_dollars_survive_what_kubernetes_expands() -> None:
    container = manifest(TPU, *AWKWARD)["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"][
        "containers"
    ][0]
    assert [expand(word, {"HOME": "/root", "LAUNCH_FILES": "x"}) for word in container["args"]] == ["train", *AWKWARD]


def test_code_over_one_mebibyte_goes_in_parts() -> None:
    code = os.urandom(2_000_000)
    maps = code_maps(Job(name=NAME, arguments=("train",)), bundle(code), {})
    parts = {name: base64.b64decode(part) for each in maps for name, part in each["binaryData"].items()}
    assert all(len(part) < 1 << 20 for part in parts.values()) and len(maps) == 3
    assert b"".join(parts[name] for name in sorted(parts)) == code
    with pytest.raises(Exception, match="ConfigMaps"):
        code_maps(Job(name=NAME, arguments=("train",)), bundle(bytes(900_000 * PARTS + 1)), {})


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--topology=v5e:4x4", "--gpu=x"], "one of them"),
        ([], "one of them"),
        (["--gpu=x", "\udcff"], "UTF-8"),
        (["--gpu=x", "--attempts=0"], "--attempts"),
    ],
)
def test_what_is_wrong_is_refused_in_one_line(start: Start, flags: list[str], told: str) -> None:
    cluster, bench = start("--spot")
    assert bench.launch(*flags) == 2
    assert bench.stderr.count("\n") == 1 and told in bench.stderr and not cluster.log


def bundle(code: bytes) -> Bundle:
    return Bundle(code=code, digest=hashlib.sha256(code).hexdigest(), arguments=b"", setup="true")


def manifest(pool: Pool, *words: str) -> dict[str, Any]:
    job = Job(name=NAME, arguments=("train", *words))
    labels = {"launch-name": NAME, "launch-owner": "me"}
    return jobset(job, bundle(b"code"), pool, labels, "image", attempts=3, account="storage")
