"""The workers of a job over ssh: send the code, start the command, follow what it prints, stop it."""

import hashlib
import io
import queue
import shlex
import subprocess
import tarfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from launch.attempts import LOST
from launch.code import archive
from launch.errors import UserError
from launch.tools import pass_on, reading
from launch.worker import GONE, STOPPED

SETUP = """\
set -e
if [ ! -e .venv/ready ]; then
  python=
  for candidate in python3.13 python3.12 python3.11 python3; do
    if "$candidate" -c 'import sys, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      python=$candidate; break
    fi
  done
  if [ -n "$python" ]; then "$python" -m venv .venv
  else python3 -m pip install --quiet --user uv && python3 -m uv venv --quiet --seed --python 3.12 .venv; fi
  .venv/bin/python -m pip install --quiet --disable-pip-version-check -r requirements.txt -e '.[tpu,gcs]'
  touch .venv/ready
fi
"""
"""What is run on each worker before the command: an interpreter with the requirements and the tpu extra in .venv."""

CONNECT = 15  # seconds for one attempt to connect
SAVE = 60.0  # seconds for a job that is asked to end to save a checkpoint


@dataclass(frozen=True)
class Worker:
    """One host: 'SLICE.HOST', the address that ssh goes to, and variables that only it is given."""

    name: str
    address: str
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Ssh:
    """How workers are reached: the ssh command with the user's own flags, the key, the login name."""

    command: tuple[str, ...]
    key: str
    user: str
    patience: float  # seconds that a worker may not answer before it counts as lost

    def to(self, address: str, remote: str) -> list[str]:
        """The whole command; of an option that is given twice ssh takes the first, so the user's own flags win."""
        options = [
            "BatchMode=yes",
            f"ConnectTimeout={CONNECT}",
            "ServerAliveInterval=15",
            "ServerAliveCountMax=4",
            "StrictHostKeyChecking=no",  # the machine is minutes old and its address was used by others before
            "UserKnownHostsFile=/dev/null",
            "LogLevel=ERROR",
            f"User={self.user}",
        ]
        return [*self.command, "-i", self.key, *(f"-o{option}" for option in options), address, remote]


class Unreached(Exception):
    """Some workers did not answer in time, or what they were asked to do failed; the message names them."""


@dataclass(frozen=True, kw_only=True)
class Bundle:
    """What every worker is sent: the exact code, the arguments separated by NUL, how to set the machine up."""

    code: bytes
    digest: str
    arguments: bytes
    setup: str

    @classmethod
    def of(cls, arguments: Sequence[str], setup: str) -> "Bundle":
        code, digest = archive()
        packed = b"".join(argument.encode(errors="surrogateescape") + b"\0" for argument in arguments)
        return cls(code=code, digest=digest, arguments=packed, setup=setup)

    @property
    def id(self) -> str:
        """Tells whether a job that is found running is this one."""
        return hashlib.sha256(f"{self.digest}\n{self.setup}\n".encode() + self.arguments).hexdigest()

    def packed(self, environment: Mapping[str, str]) -> bytes:
        environment = {"JAX_PLATFORMS": "tpu,cpu", **environment}  # a TPU that JAX does not find is an error, not a CPU
        content = {
            "code.tar.gz": self.code,
            "arguments": self.arguments,
            "setup": self.setup.encode(),
            "environment": "".join(f"{name}={value}\n" for name, value in environment.items()).encode(),
            "worker.py": Path(__file__).with_name("worker.py").read_bytes(),
        }
        out = io.BytesIO()
        with tarfile.open(fileobj=out, mode="w") as tar:
            for name, data in content.items():
                entry = tarfile.TarInfo(name)
                entry.size = len(data)
                tar.addfile(entry, io.BytesIO(data))
        return out.getvalue()


class Crew:
    """All workers of one job."""

    def __init__(self, name: str, ssh: Ssh, say: Callable[[str], None], workers: Sequence[Worker] = ()) -> None:
        self.workers, self.ssh, self.say = workers, ssh, say
        self.folder = f".launch/{name}"  # in the home directory of the login name
        self.offsets: dict[str, int] = {}  # how much of each worker's log was printed
        self.following: Following | None = None

    def remote(self, *action: str) -> str:
        """The command line for the worker's shell."""
        return shlex.join(["python3", f"{self.folder}/new/worker.py", action[0], self.folder, *action[1:]])

    def send(self) -> str:
        """The command line that takes a packed bundle from its standard input."""
        return f"mkdir -p {self.folder}/new && tar -xf - -C {self.folder}/new"

    def begin(self, bundle: Bundle) -> bool:
        """Send the bundle and start the job, unless it runs already. Whether it was started anew."""
        look = f"{self.send()} && {self.remote('begin', bundle.id, bundle.digest)}"
        states = self.each(look, lambda worker: bundle.packed(worker.environment), self.ssh.patience)
        if "other" in states.values():
            raise UserError(
                f"{self.folder.rsplit('/', 1)[1]} is running with other code or other arguments; "
                "stop it first, or give this one another --name"
            )
        if set(states.values()) <= {"running", "done"}:
            self.say("found running: following it")
            return False
        self.offsets = {name: int(at) for name, at in self.each(self.remote("start", bundle.id)).items()}
        return True

    def each(
        self, remote: str, stdin: Callable[[Worker], bytes] = lambda worker: b"", within: float = 2 * CONNECT
    ) -> dict[str, str]:
        """Run one command line on every worker at once; what each printed, without the white space at the ends.

        A worker that cannot be reached is tried again until ``within`` seconds have passed: machines answer some
        time after they are said to be ready.
        """
        deadline = time.monotonic() + within
        done: dict[str, str] = {}
        failed: dict[str, str] = {}

        def one(worker: Worker) -> None:
            while True:
                result = subprocess.run(
                    self.ssh.to(worker.address, remote),
                    input=stdin(worker),
                    capture_output=True,
                    process_group=0,
                )
                if result.returncode == 0:
                    done[worker.name] = result.stdout.decode().strip()
                    return
                told = result.stderr.decode(errors="replace").strip().splitlines()[-1:]
                failed[worker.name] = f"worker {worker.name} ({worker.address}): {' '.join(told)}"
                if result.returncode != LOST or time.monotonic() > deadline:
                    return
                time.sleep(2)

        threads = [threading.Thread(target=one, args=(worker,), daemon=True) for worker in self.workers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        missing = [failed[worker.name] for worker in self.workers if worker.name not in done]
        if missing:
            raise Unreached(f"{len(done)} of {len(self.workers)} workers answered; {'; '.join(missing[:4])}")
        return done

    def follow(self, healthy: Callable[[], str], every: float) -> int:
        """Print what every worker prints until the job ends; its exit status. See ``Following``."""
        self.following = Following(self, healthy, every)
        return self.following.status()

    def stop(self) -> None:
        """Ask the job to save and end, on every worker at once, and see to it that it has."""
        try:
            self.each(self.remote("stop", str(SAVE)))
        finally:
            if self.following:
                self.following.close(after=5.0)


class Following:
    """The connections over which the workers' output comes."""

    def __init__(self, crew: Crew, healthy: Callable[[], str], every: float) -> None:
        """``healthy`` says why the machines cannot go on, or nothing; it is asked ``every`` so many seconds."""
        self.crew, self.healthy, self.every = crew, healthy, every
        self.ends: queue.Queue[tuple[str, int]] = queue.Queue()
        self.gone: dict[str, float] = {}  # since when a worker is not connected
        self.over = threading.Event()
        self.connections: dict[str, subprocess.Popen[bytes]] = {}
        self.threads = [threading.Thread(target=self._print, args=(worker,), daemon=True) for worker in crew.workers]
        for thread in self.threads:
            thread.start()

    def status(self) -> int:
        """0 when all workers have ended with 0, else the first other exit status.

        Where the machines cannot go on, or a worker is not connected, the job was lost, whatever the others made of
        that. Only a user's error (2) and a stop on request (130) stand before it.
        """
        left, asked, first = len(self.crew.workers), time.monotonic(), 0
        saved_by = float("inf")
        while left and time.monotonic() < saved_by:
            try:
                name, status = self.ends.get(timeout=min(self.every, 1.0))
            except queue.Empty:
                if time.monotonic() - asked >= self.every and not first:
                    asked = time.monotonic()
                    if why := self.late() or self.healthy():
                        return self._lost(why)
                continue
            left -= 1
            if status and not first:
                self.crew.say(f"worker {name}: exit status {status}")
                if status not in (2, STOPPED) and (why := self.late(0.0) or self.healthy()):
                    return self._lost(why)
                first = status
                # The others have been asked to save too, and are not to be cut short.
                saved_by = time.monotonic() + (SAVE if status == 143 else 0.0)
        self.close(after=2.0 if not left else 0.5)
        return first

    def late(self, patience: float | None = None) -> str:
        patience = self.crew.ssh.patience if patience is None else patience
        for name, since in list(self.gone.items()):
            if time.monotonic() - since >= patience:
                return f"worker {name}: no connection for {time.monotonic() - since:.0f} s"
        return ""

    def _lost(self, why: str) -> int:
        self.crew.say(why)
        self.close()
        return LOST

    def close(self, after: float = 0.0) -> None:
        """Print what still comes for so many seconds, and end the connections."""
        until = time.monotonic() + after
        for thread in self.threads:
            thread.join(max(0.0, until - time.monotonic()))
        self.over.set()
        for connection in list(self.connections.values()):
            connection.terminate()

    def _print(self, worker: Worker) -> None:
        """Connect, and connect anew where the connection goes away, until the job has an exit status."""
        crew = self.crew
        while not self.over.is_set():
            where = crew.remote("follow", str(crew.offsets.get(worker.name, 0)))
            process = self.connections[worker.name] = reading(crew.ssh.to(worker.address, where))
            assert process.stdout is not None
            for line in process.stdout:
                self.gone.pop(worker.name, None)
                crew.offsets[worker.name] = crew.offsets.get(worker.name, 0) + len(line)
                pass_on(worker.name, line)
            status = process.wait()
            if self.over.is_set():
                return
            if status != LOST:
                self.gone.pop(worker.name, None)
                self.ends.put((worker.name, LOST if status == GONE else status))
                return
            self.gone.setdefault(worker.name, time.monotonic())
            self.over.wait(2)
