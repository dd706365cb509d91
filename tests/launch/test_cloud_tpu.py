"""python -m launch cloud_tpu: the real gcloud against a local stand-in for the cloud, real sshd as the workers.

Cases that are about the launcher and not about gcloud run with a quicker gcloud, which is held against the real one.
"""

import json
import os
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from launch.machines import Request
from launch.queued import QueuedResource
from launch.tpus import parse
from tests.launch.cloud import ROOT, Bench, gcloud_environment, make_checkout, wait_until
from tests.launch.fake_machines import SSHD, processes
from tests.launch.fake_tpu import GRANTED, Cloud

pytestmark = [pytest.mark.exhaustive, pytest.mark.skipif(SSHD is None, reason="sshd is not installed")]
REAL = pytest.param("real", marks=pytest.mark.skipif(not shutil.which("gcloud"), reason="gcloud is not installed"))
BOTH = pytest.mark.parametrize("gcloud", [REAL, "quick"])
ONLY_REAL = pytest.mark.parametrize("gcloud", [REAL])
NAME = "demo"
AWKWARD = ["a;b", "x,y", "it's", "$HOME", "a b", "line\nbreak", "", "*", "~", 'say "hi"', "\\", "é", "\udcff", "--"]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkout(tmp_path_factory.mktemp("checkout"))


Start = Callable[..., tuple[Cloud, Bench]]


@pytest.fixture
def start(checkout: Path, tmp_path: Path) -> Iterator[Start]:
    """Makes a cloud whose requests go through the given states, and a launcher that reaches it."""
    opened: list[Cloud | Bench] = []

    def make(*scripts: list[str], gcloud: str = "quick", slices: int = 1) -> tuple[Cloud, Bench]:
        cloud = Cloud(tmp_path / "machines", list(scripts) or [GRANTED])
        environment = gcloud_environment(tmp_path, "TPU", cloud.url)
        if gcloud == "quick":
            tool = tmp_path / "bin" / "gcloud"
            tool.parent.mkdir()
            code = (ROOT / "tests" / "launch" / "quick_gcloud.py").read_text()
            tool.write_text(code.replace("/usr/bin/env python3", sys.executable + " -S"))
            tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
            environment["PATH"] = f"{tool.parent}:{os.environ['PATH']}"
        flags = [
            *[f"--name={NAME}", "--topology=v5e:4x4", f"--slices={slices}", "--zone=us-east5-a", "--poll=0.3"],
            *[f"--ssh=ssh -F none -p {cloud.port}", f"--ssh_key={tmp_path}/key", f"--setup={Bench.SETUP}"],
            "--backoff=0.1",
        ]
        bench = Bench(checkout, tmp_path, "cloud_tpu", flags, environment)
        opened.extend([bench, cloud])
        return cloud, bench

    yield make
    for each in opened:
        each.close()


def nothing_left(cloud: Cloud) -> bool:
    return not cloud.requests and not cloud.nodes and not cloud.machines


@BOTH
def test_two_slices_run_the_exact_code_with_the_exact_arguments(start: Start, gcloud: str) -> None:
    cloud, bench = start(gcloud=gcloud, slices=2)
    assert bench.launch(*AWKWARD, "--spot") == 0, bench.stderr
    assert sorted(who for who, _, _ in bench.starts) == ["0.0", "0.1", "1.0", "1.1"]
    expected = ["train", "--config=c.py", f"--workdir={bench.out}", *AWKWARD]
    assert all(words == [os.fsencode(word) for word in expected] for _, _, words in bench.starts)
    for worker in ("0.0", "1.1"):  # each worker's lines, in their order
        lines = [line for line in bench.stdout.splitlines() if line.startswith(f"{worker}: ")]
        assert lines == [f"{worker}: {text}" for text in ("step 1", "step 2", "step 3", "all done")]
    words = bench.stderr
    assert 0 < words.index("WAITING_FOR_RESOURCES") < words.index("PROVISIONING") < words.index("ACTIVE")
    assert nothing_left(cloud)
    assert len(cloud.calls("POST")) == len(cloud.calls("DELETE")) == 1
    (made,) = [body for method, _, body in cloud.log if method == "POST"]
    assert made["tpu"]["nodeSpec"][0]["multisliceParams"] == {"nodeCount": 2, "nodeIdPrefix": NAME}
    assert made["spot"] == {}
    odd = list(bench.folder.glob("machines/*/home/.launch/demo/code-*/odd name\n"))
    assert [path.read_text() for path in odd] == ["not committed"] * 4


@pytest.mark.parametrize(
    ("nodes", "state"),
    [
        ([("READY", "HEALTHY")], "ready"),
        ([("READY", "UNHEALTHY_TENSORFLOW")], "broken"),
        ([("PREEMPTED", "HEALTHY")], "broken"),
        ([("STOPPED", "HEALTHY")], "broken"),
        ([("A_NEW_WORD", "HEALTHY")], "broken"),
        ([("READY", "HEALTHY"), ("PREEMPTED", "HEALTHY")], "broken"),
        ([("STARTING", "HEALTHY")], "waiting"),
        ([], "waiting"),
    ],
)
@pytest.mark.parametrize("older", [False, True])
def test_what_is_found(monkeypatch: pytest.MonkeyPatch, nodes: list[tuple[str, str]], state: str, older: bool) -> None:
    """X02: anything but ready and healthy is not usable; X03: nor is a node that another request has left behind."""
    request = Request(name=NAME, owner="me", slice=parse("v5e:4x4"), slices=1, zone="us-east5-a")
    spec = {"nodeSpec": [{"node": {"labels": request.labels}}]}
    made = {"name": f"p/queuedResources/{NAME}", "state": {"state": "ACTIVE"}, "tpu": spec}
    end = {"networkEndpoints": [{"ipAddress": "10.0.0.1"}], "labels": request.labels}
    found = [
        {"name": NAME, "queuedResource": made["name"], "state": word, "health": health, **end} for word, health in nodes
    ]
    left = [{"name": NAME, "queuedResource": "p/queuedResources/older", "state": "READY", **end}] if older else []
    monkeypatch.setattr("launch.queued.ask", lambda command: [made] if "queued-resources" in command else left + found)
    seen = QueuedResource(request).look()
    assert seen.state == state
    assert [worker.name for worker in seen.workers] == (["0.0"] if state == "ready" else [])


@ONLY_REAL
def test_preempted_once_goes_on_from_the_last_step(start: Start, gcloud: str) -> None:
    cloud, bench = start(gcloud=gcloud, slices=2)
    bench.want(steps=40)
    process = bench.start()
    wait_until(lambda: "0.0: step 5\n" in bench.stdout)
    cloud.preempt()
    bench.want(steps=int((bench.out / "saved-0.0").read_text()) + 2)
    assert process.wait(timeout=120) == 0, bench.stderr
    begins = [begin for who, begin, _ in bench.starts if who == "0.0"]
    assert len(begins) == 2 and begins[1] >= 5, bench.stderr
    assert "SUSPENDED" in bench.stderr
    assert nothing_left(cloud) and len(cloud.calls("POST")) == 2


@pytest.mark.parametrize(("status", "who", "starts"), [(2, "0.1", 1), (1, "0.1", 1), (137, "0.1", 3), (143, "all", 3)])
def test_exit_status_decides(start: Start, status: int, who: str, starts: int) -> None:
    """137 and 143 are tried again, on the same machines, up to the cap; no worker outlives an attempt."""
    cloud, bench = start()
    bench.want(steps=10_000, after=2, end=status, who=who)
    assert bench.launch("--attempts=3") == status, bench.stderr
    assert [begin for name, begin, _ in bench.starts if name == "0.1"] == [0, 2, 4][:starts], bench.stderr
    assert len([name for name, _, _ in bench.starts if name == "0.0"]) == starts
    assert ("given up" in bench.stderr) == (starts == 3)
    assert nothing_left(cloud) and len(cloud.calls("POST")) == 1


def test_chip_hours_are_capped_within_an_attempt(start: Start) -> None:
    """16 chips for 2 s are 0.0089 chip-hours; the job is asked to save, and not tried again."""
    cloud, bench = start()
    bench.want(steps=10_000)
    assert bench.launch("--chip_hours=0.01") == 143, bench.stderr
    assert len(bench.starts) == 2 and "0.0: saved on request" in bench.stdout
    assert "chip-hours" in bench.stderr and "given up" in bench.stderr
    assert nothing_left(cloud)


@pytest.mark.parametrize("end", ["FAILED", "SUSPENDED"])
def test_a_request_that_comes_to_nothing_is_deleted_and_made_anew(start: Start, end: str) -> None:
    cloud, bench = start(["WAITING_FOR_RESOURCES", end], GRANTED)
    assert bench.launch() == 0, bench.stderr
    assert end in bench.stderr and len(cloud.calls("POST")) == 2 and nothing_left(cloud)


def test_failed_twice_is_given_up_in_one_line(start: Start) -> None:
    cloud, bench = start(["PROVISIONING", "FAILED"])
    assert bench.launch() == 1
    lines = [line for line in bench.stderr.splitlines() if "FAILED" in line]
    assert len(lines) == 2 and all("no such luck" in line for line in lines), bench.stderr
    assert "Traceback" not in bench.stderr and not bench.starts and nothing_left(cloud)


def test_a_refused_creation_is_one_line(start: Start) -> None:
    cloud, bench = start()
    cloud.refuse = "quota of v5e\nis used up"
    assert bench.launch() == 1
    assert [line for line in bench.stderr.splitlines() if "quota of v5e" in line], bench.stderr
    assert "Traceback" not in bench.stderr and len(cloud.calls("POST")) == 1


@pytest.mark.parametrize(
    ("phase", "number"),
    [
        *[(phase, signal.SIGINT) for phase in ("asking", "waiting", "sending", "running")],
        *[("running", number) for number in (signal.SIGTERM, signal.SIGHUP)],
    ],
)
def test_a_signal_in_any_phase_leaves_nothing_behind(start: Start, phase: str, number: signal.Signals) -> None:
    cloud, bench = start(["WAITING_FOR_RESOURCES"] * (500 if phase == "waiting" else 1) + GRANTED)
    bench.want(steps=10_000)
    cloud.delay = 1.0 if phase == "asking" else 0.0
    process = bench.start()
    come = {
        "asking": lambda: cloud.calls("POST"),
        "waiting": lambda: "WAITING" in bench.stderr,
        "sending": lambda: "sending the code" in bench.stderr,
        "running": lambda: "0.1: step 2\n" in bench.stdout,
    }[phase]
    wait_until(come)
    os.killpg(process.pid, number)  # as a terminal does
    assert process.wait(timeout=30) == 128 + number, bench.stderr
    assert nothing_left(cloud) and len(cloud.calls("POST")) == 1
    assert "Traceback" not in bench.stderr
    if phase == "running":
        assert "0.0: saved on request" in bench.stdout and "0.1: saved on request" in bench.stdout


@ONLY_REAL
def test_ctrl_c_while_it_runs(start: Start, gcloud: str) -> None:
    cloud, bench = start(gcloud=gcloud)
    bench.want(steps=10_000)
    process = bench.start()
    wait_until(lambda: "0.0: step 2\n" in bench.stdout)
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(timeout=30) == 130, bench.stderr
    assert nothing_left(cloud)


def test_a_second_ctrl_c_leaves_at_once_and_says_what_is_left(start: Start) -> None:
    cloud, bench = start()
    bench.want(steps=10_000, deaf=True)
    process = bench.start()
    wait_until(lambda: "0.0: step 2\n" in bench.stdout)
    os.killpg(process.pid, signal.SIGINT)
    wait_until(lambda: "save and end" in bench.stderr)
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(timeout=20) == 130
    (name,) = cloud.requests
    commands = [line for line in bench.stderr.splitlines() if line.startswith("gcloud ")]
    subprocess.run(["sh", "-c", commands[-1]], env={**os.environ, **bench.environment}, check=True, timeout=30)
    assert nothing_left(cloud) and name.endswith(f"/{NAME}")


@ONLY_REAL
def test_what_somebody_else_made_is_never_touched(start: Start, gcloud: str) -> None:
    cloud, bench = start(gcloud=gcloud)
    name = f"projects/p/locations/us-east5-a/queuedResources/{NAME}"
    labels = {"launch-name": NAME, "launch-owner": "somebody-else"}
    cloud.create(name, {"tpu": {"nodeSpec": [{"nodeId": NAME, "node": {"labels": labels}}]}})
    cloud.states[name] = []
    for action, status in (("", 2), ("stop", 2), ("status", 2)):
        assert bench.launch(action=action) == status, bench.stderr
    assert bench.stderr.count("--name") == 3
    assert not cloud.calls("POST") and not cloud.calls("DELETE") and list(cloud.requests) == [name]


def test_a_second_launch_goes_on_with_the_first(start: Start) -> None:
    cloud, bench = start()
    bench.want(steps=60)
    first = bench.start()
    wait_until(lambda: "0.0: step 3\n" in bench.stdout)
    first.kill()  # the laptop is closed
    first.wait()
    assert bench.launch("--odd") == 2 and "other" in bench.stderr  # other arguments, same name
    assert cloud.requests
    assert bench.launch() == 0, bench.stderr
    assert len(bench.starts) == 2 and len(cloud.calls("POST")) == 1 and nothing_left(cloud)
    assert "0.1: step 1\n" in bench.stdout and "0.1: all done\n" in bench.stdout


def test_status_logs_and_stop(start: Start) -> None:
    cloud, bench = start()
    assert bench.launch(action="stop") == 0
    assert bench.launch(action="status") == 0 and f"{NAME}: absent" in bench.stdout
    assert bench.launch(action="logs") == 1
    bench.want(steps=10_000)
    first = bench.start()
    wait_until(lambda: "0.0: step 3\n" in bench.stdout)
    assert bench.launch(action="status") == 0 and f"{NAME}: ACTIVE, 2 workers; job: running" in bench.stdout
    logs = bench.start(action="logs")
    wait_until(lambda: bench.stdout.count("0.0: step 3\n") == 2)
    assert bench.launch(action="stop") == 0, bench.stderr
    assert first.wait(timeout=30) == logs.wait(timeout=30) == 130, bench.stderr  # not taken for a preemption
    assert nothing_left(cloud) and len(cloud.calls("POST")) == 1


def test_keep_leaves_the_machines_to_the_next_launch(start: Start) -> None:
    cloud, bench = start()
    assert bench.launch("--keep") == 0, bench.stderr
    assert len(cloud.machines) == 1
    bench.want(steps=6)
    assert bench.launch("--extra") == 0, bench.stderr
    assert [begin for who, begin, _ in bench.starts if who == "0.1"] == [0, 3]
    assert nothing_left(cloud) and len(cloud.calls("POST")) == 1


@pytest.mark.parametrize("loss", ["machine", "connection", "job", "node state"])
def test_a_lost_worker_is_noticed_without_an_exit_status(start: Start, loss: str) -> None:
    cloud, bench = start()
    bench.want(steps=10_000)
    process = bench.start("--patience=2")
    wait_until(lambda: "0.1: step 3\n" in bench.stdout)
    bench.want(steps=1)
    (machines,) = cloud.machines.values()
    if loss == "job":
        for each in processes(machines[1].disk):
            if (
                b"/new/worker.py\0keep" in (words := Path(f"/proc/{each}/cmdline").read_bytes())
                or b"transformer" in words
            ):
                os.kill(each, signal.SIGKILL)
    elif loss == "connection":  # and the cloud says that all is well
        machines[1].off()
    else:
        (node,) = cloud.nodes.values()
        node["state"] = "STOPPED" if loss == "machine" else "BROKEN_IN_A_NEW_WAY"
        if loss == "machine":
            machines[1].off()
    assert process.wait(timeout=40) == 0, bench.stderr
    assert len(cloud.calls("POST")) == (1 if loss == "job" else 2) and nothing_left(cloud)


def test_a_worker_that_never_answers_is_named(start: Start) -> None:
    cloud, bench = start()
    cloud.silent = {"0.1"}
    assert bench.launch("--attempts=1", "--patience=2") == 255
    assert "1 of 2 workers answered; worker 0.1 (127.0.1.2)" in bench.stderr
    assert nothing_left(cloud) and not bench.starts


@pytest.mark.parametrize(
    ("flag", "told"),
    [
        ("--zone=us-east5", "is a region"),
        ("--zone=mars", "us-east5-a"),
        ("--topology=v9:4x4", "v5e"),
        ("--topology=v5e", "v5e:4x4"),
        ("--topology=v5p:4x4", "v5p:2x2x4"),
        ("--topology=v5p:2x2x8", "compute"),
        ("--slices=0", "--slices"),
        ("--chip_hours=no", "--chip_hours"),
        ("--route=road", "compute"),
        ("--route=queued --topology=tpu7x:2x2x2", "compute"),
        ("--workdir=runs/x", "gs://"),
    ],
)
def test_what_is_wrong_is_refused_before_anything_is_asked(start: Start, flag: str, told: str) -> None:
    cloud, bench = start()
    for word in flag.split():
        bench.flags = [each for each in bench.flags if not each.startswith(word.partition("=")[0] + "=")]
    assert bench.launch(*flag.split()) == 2
    assert bench.stderr.count("\n") == 1 and told in bench.stderr
    assert not cloud.log


@pytest.mark.parametrize(
    ("plan", "force", "status"),
    [
        ('{"fits": false, "nearest": "batch 8 would fit"}', False, 2),
        ('{"fits": false, "nearest": "batch 8 would fit"}', True, 0),
        ("no JSON", False, 0),
    ],
)
def test_the_plan_is_asked_first(start: Start, plan: str, force: bool, status: int) -> None:
    cloud, bench = start()
    bench.environment["PLAN"] = plan
    assert bench.launch(*(["--force"] if force else [])) == status, bench.stderr
    assert ("batch 8 would fit" in bench.stderr) == (status == 2)
    assert ("not checked" in bench.stderr) == (plan == "no JSON")
    assert len(cloud.calls("POST")) == (status == 0)


def test_dry_run_is_what_is_run(start: Start) -> None:
    """The commands of a dry run, run by a shell, make the same machines and delete them."""
    cloud, bench = start()
    assert bench.launch(*AWKWARD, "--dry_run") == 0, bench.stderr
    assert not cloud.log
    rendered = bench.stdout
    assert bench.launch() == 0, bench.stderr
    posted = [body for method, _, body in cloud.log if method == "POST"]
    environment = {**os.environ, **bench.environment}
    for line in rendered.splitlines():
        if line.startswith("gcloud "):
            subprocess.run(["sh", "-c", line], env=environment, check=True, capture_output=True, timeout=30)
    again = [body for method, _, body in cloud.log if method == "POST"][1:]
    keys = "ssh-keys"
    for body in (*posted, *again):
        body["tpu"]["nodeSpec"][0]["node"]["metadata"].pop(keys)  # the key was made by the launch
    assert again == posted and nothing_left(cloud)
    (bench.folder / "new").mkdir()
    (command,) = [part for part in rendered.split("printf ")[1:]]
    subprocess.run(
        ["sh", "-c", "printf " + command.partition("> new/arguments")[0] + "> new/arguments"],
        cwd=bench.folder,
        check=True,
    )
    words = ["train", "--config=c.py", f"--workdir={bench.out}", *AWKWARD]
    assert (bench.folder / "new" / "arguments").read_bytes() == b"".join(os.fsencode(word) + b"\0" for word in words)


@pytest.mark.parametrize("flags", [["--spot"], ["--internal_ips", "--network=n"]], ids=str)
@pytest.mark.skipif(not shutil.which("gcloud"), reason="gcloud is not installed")
def test_quick_gcloud_asks_for_the_same(start: Start, flags: list[str]) -> None:
    cloud, bench = start(slices=len(flags))
    assert bench.launch("--dry_run", *flags) == 0
    commands = [line for line in bench.stdout.splitlines() if line.startswith("gcloud ")]
    commands = list(dict.fromkeys(commands))
    asked = []
    for path in (bench.environment["PATH"], os.environ["PATH"]):
        before = len(cloud.log)
        for command in commands:
            environment = {**os.environ, **bench.environment, "PATH": path}
            subprocess.run(["sh", "-c", command], env=environment, check=True, capture_output=True, timeout=30)
        asked.append([call for call in cloud.log[before:] if "/operations/" not in call[1]])
    assert json.dumps(asked[0], sort_keys=True) == json.dumps(asked[1], sort_keys=True)


def test_what_was_deleted_by_somebody_is_not_asked_for_again(start: Start) -> None:
    cloud, bench = start()
    bench.want(steps=10_000)
    process = bench.start()
    wait_until(lambda: "0.1: step 3\n" in bench.stdout)
    with cloud.lock:
        cloud.delete(next(iter(cloud.requests)))
    assert process.wait(timeout=120) == 1 and "deleted by someone else" in bench.stderr
    assert len(cloud.calls("POST")) == 1


def test_a_signal_during_the_clean_up_does_not_cut_it_short(start: Start) -> None:
    cloud, bench = start()
    cloud.delay = 1.0
    process = bench.start()
    wait_until(lambda: "deleting" in bench.stderr)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=120) == 0 and "leaves at once" in bench.stderr
    assert nothing_left(cloud)
