"""A real Slurm of two nodes on this machine, for as long as a test needs it; from Debian's slurm-wlm and munge.

One daemon per node, all with files, sockets and ports of their own, so nothing of the machine's is touched. Runs as
root, without systemd. Nodes have two simulated GPUs each.
"""

import contextlib
import os
import random
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from pathlib import Path

HOST = socket.gethostname().split(".")[0]
NODES = (HOST, f"{HOST}-b")  # JAX looks for the coordinator at the first name, so that one must resolve
MISSING = [name for name in ("slurmctld", "slurmd", "munged", "srun") if not shutil.which(name)]
NEEDS = (
    f"Slurm's tests need {', '.join(MISSING)} (Debian: apt-get install slurm-wlm munge)"
    if MISSING
    else "Slurm's tests need to run as root"
    if os.geteuid()
    else ""
)
"""Why there can be no cluster here; empty where there can."""

CONF = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={home}/munge.socket
CredType=cred/munge
SlurmctldPort={ports[0]}
FirstJobId={first}
StateSaveLocation={home}/state
SlurmdSpoolDir={home}/spool-%n
SlurmctldPidFile={home}/slurmctld.pid
SlurmdPidFile={home}/slurmd-%n.pid
SlurmctldLogFile={home}/slurmctld.log
SlurmdLogFile={home}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
GresTypes=gpu
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
ReturnToService=2
SchedulerParameters=sched_interval=1,batch_sched_delay=0
SlurmdParameters=config_overrides
KillWait=5
MinJobAge=300
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


@contextlib.contextmanager
def cluster(home: Path) -> Iterator[dict[str, str]]:
    """Start the daemons and wait until both nodes are idle; gives the environment variables that clients need."""
    ports = _free_ports(1 + len(NODES))
    (home / "state").mkdir(parents=True)
    key = home / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o600)
    nodes = [
        f"NodeName={name} NodeHostname={HOST} NodeAddr=127.0.0.1 Port={port} CPUs=4 RealMemory=1000 Gres=gpu:2\n"
        for name, port in zip(NODES, ports[1:], strict=True)
    ]
    # JAX's port follows from the job's number, so two clusters at once must not both begin at 1.
    conf = home / "slurm.conf"
    conf.write_text(CONF.format(host=HOST, home=home, ports=ports, first=random.randrange(1, 10**7)) + "".join(nodes))
    (home / "gres.conf").write_text("".join(f"NodeName={name} Name=gpu File=/dev/tty[0-1]\n" for name in NODES))
    (home / "cgroup.conf").write_text("")
    env = {"SLURM_CONF": str(conf)}
    munge = [f"--{name}={home}/munge.{name.split('-')[0]}" for name in ("socket", "key-file", "pid-file", "log-file")]
    commands = [
        ["munged", "--foreground", "--force", f"--seed-file={home}/munge.seed", *munge],
        ["slurmctld", "-D", "-f", str(conf)],
        *(["slurmd", "-D", "-N", name, "-f", str(conf)] for name in NODES),
    ]
    daemons = []
    try:
        with (home / "daemons.log").open("wb") as log:
            for command in commands:
                daemons.append(subprocess.Popen(command, env={**os.environ, **env}, stdout=log, stderr=log))
                if command[0] == "munged":
                    _until(lambda: (home / "munge.socket").exists(), "munged")
        idle = ["sinfo", "-h", "-t", "idle", "-o", "%D"]
        _until(lambda: _output(idle, env) == str(len(NODES)), "Slurm")
        over = threading.Event()
        releaser = threading.Thread(target=_release, args=(env, over))
        releaser.start()
        try:
            yield env
        finally:
            over.set()
            releaser.join()
    finally:
        _output(["scancel", "--user=root"], env)
        for daemon in reversed(daemons):
            daemon.send_signal(signal.SIGTERM)
        for daemon in daemons:
            try:
                daemon.wait(timeout=10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()


def _release(env: dict[str, str], over: threading.Event) -> None:
    """Slurm has a job that was queued again wait for two minutes; here for two seconds.

    Within one second of its end a node takes it for the same attempt, and refuses it.
    """
    while not over.wait(0.3):
        for line in _output(["squeue", "-h", "-o", "%i %r %S"], env).splitlines():
            number, reason, start = line.split()
            if reason != "BeginTime" or start == "N/A":  # the latter once it was moved
                continue
            if datetime.fromisoformat(start) > datetime.now() + timedelta(seconds=5):
                _output(["scontrol", "update", f"jobid={number}", "StartTime=now+2"], env)


def _output(command: list[str], env: dict[str, str]) -> str:
    return subprocess.run(
        command, env={**os.environ, **env}, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, timeout=30
    ).stdout.strip()


def _until(true: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 30
    while not true():
        assert time.monotonic() < deadline, f"{what} did not start"
        time.sleep(0.05)
