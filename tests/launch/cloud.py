"""What the tests of launching share: a small checkout that stands in for this one, and the launcher run from it."""

import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def gcloud_environment(home: Path, service: str, url: str) -> dict[str, str]:
    """For a gcloud that keeps its settings under ``home`` and asks ``url`` instead of the cloud."""
    return {
        "CLOUDSDK_CONFIG": str(home / "gcloud"),
        f"CLOUDSDK_API_ENDPOINT_OVERRIDES_{service}": url,
        "CLOUDSDK_AUTH_DISABLE_CREDENTIALS": "true",
        "CLOUDSDK_CORE_PROJECT": "p",
        "CLOUDSDK_CORE_DISABLE_USAGE_REPORTING": "true",
        "CLOUDSDK_COMPONENT_MANAGER_DISABLE_UPDATE_CHECK": "true",
        "CLOUDSDK_CORE_CHECK_GCE_METADATA": "false",
    }


STAND_IN = '''
"""Stands in for the library: takes steps of 0.05 s, saves each, goes on from the last one that was saved."""

import json, os, signal, sys, time
from pathlib import Path

if sys.argv[1] == "plan":
    print(os.environ["PLAN"], end="")
    sys.exit(0)
me = os.environ.get("WHO") or Path(os.environ["FAKE_MACHINE"]).name.partition("-")[2]
out = Path(next(word for word in sys.argv if word.startswith("--workdir=")).partition("=")[2])
saved, wanted = out / f"saved-{me}", json.loads((out / "wanted.json").read_text())
part = out / f"part-{me}"
begin = int(saved.read_text()) if saved.exists() else 0
with open(out / "starts.jsonl", "a") as log:
    print(json.dumps([me, begin, [os.fsencode(word).hex() for word in sys.argv[1:]]]), file=log)

def stop(number, frame):
    if not wanted.get("deaf"):
        print("saved on request", flush=True)
        sys.exit(143)

signal.signal(signal.SIGTERM, stop)
for step in range(begin, wanted["steps"]):
    time.sleep(0.05)
    part.write_text(str(step + 1))
    part.rename(saved)  # whole, wherever it is killed
    print("step", step + 1, flush=True)
    if step + 1 - begin == wanted.get("after") and wanted["who"] in (me, "all"):
        sys.exit(wanted["end"])
print("all done")
'''


def make_checkout(folder: Path) -> Path:
    """The launcher, and a stand-in for the library that it launches."""
    shutil.copytree(ROOT / "launch", folder / "launch", ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "transformer").mkdir()
    (folder / "transformer" / "__init__.py").touch()
    (folder / "transformer" / "__main__.py").write_text(STAND_IN)
    (folder / "libtpu.py").touch()  # so that the plan is asked
    (folder / ".gitignore").write_text("__pycache__/\n.venv/\n")
    (folder / "odd name\n").write_text("not committed")
    subprocess.run(["git", "init", "-q"], cwd=folder, check=True)
    return folder


class Bench:
    """Runs the launcher from a checkout; the job's directory is ``out``."""

    SETUP = f"mkdir -p .venv/bin && ln -sf {shlex.quote(sys.executable)} .venv/bin/python"

    def __init__(self, checkout: Path, folder: Path, place: str, flags: list[str], environment: dict[str, str]) -> None:
        self.checkout, self.folder, self.place, self.flags = checkout, folder, place, flags
        self.out = folder / "out"
        self.out.mkdir()
        self.environment = {"PLAN": '{"fits": true}', **environment}
        self.started: list[subprocess.Popen[bytes]] = []
        self.want(steps=3)

    def want(self, **wanted: object) -> None:
        """The steps of the job, and that worker ``who`` ends with status ``end`` ``after`` so many of an attempt."""
        (self.out / "wanted.part").write_text(json.dumps(wanted))
        (self.out / "wanted.part").rename(self.out / "wanted.json")  # a job may be reading it

    def start(self, *words: str, action: str = "") -> "subprocess.Popen[bytes]":
        # Signals as in a shell's foreground, also where these tests run in the background; without forking under JAX.
        command = [
            "env",
            "--default-signal=INT,HUP,TERM",
            sys.executable,
            "-m",
            "launch",
            self.place,
            *([action] if action else []),
            *self.flags,
        ]
        with open(self.folder / "stdout", "ab") as out, open(self.folder / "stderr", "ab") as err:
            process = subprocess.Popen(
                [*command, "--config=c.py", f"--workdir={self.out}", *words],
                cwd=self.checkout,
                env={**os.environ, **self.environment},
                stdout=out,
                stderr=err,
                start_new_session=True,
            )
        self.started.append(process)
        return process

    def launch(self, *words: str, action: str = "") -> int:
        return self.start(*words, action=action).wait(timeout=120)

    @property
    def stdout(self) -> str:
        return (self.folder / "stdout").read_bytes().decode(errors="surrogateescape")

    @property
    def stderr(self) -> str:
        return (self.folder / "stderr").read_text()

    @property
    def starts(self) -> list[tuple[str, int, list[bytes]]]:
        """Of every start of the command: on which worker, from which step, with what arguments."""
        path = self.out / "starts.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        found = [json.loads(line) for line in lines]
        return [(who, begin, [bytes.fromhex(word) for word in words]) for who, begin, words in found]

    def close(self) -> None:
        for process in self.started:
            process.kill()
            process.wait()


def wait_until(true: Callable[[], object], within: float = 30.0) -> None:
    deadline = time.monotonic() + within
    while not true():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.02)
