"""A small checkout whose `transformer` is a stand-in: it writes down its arguments and does what a test asks.

The stand-in counts to 60 in three seconds, saves the count when it is told to leave, and goes on from there.
"""

import importlib.util
import json
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

STAND_IN = """
import json, os, signal, sys, time
from pathlib import Path
words = dict(word[2:].split("=", 1) for word in sys.argv[1:] if word.startswith("--") and "=" in word)
if "--list_arms" in sys.argv:
    print(json.dumps({"arms": ["baseline", "near zero", "far"]}))
    sys.exit(0)
me = words.get("arm", os.environ.get("SLURM_PROCID", words.get("process", "0")))
place = Path(words["workdir"])
place.mkdir(parents=True, exist_ok=True)
def note(name, value):
    (place / f"{name}-{me}").write_text(json.dumps(value))
def read(name, otherwise):
    file = place / f"{name}-{me}"
    return json.loads(file.read_text()) if file.exists() else otherwise
tries = read("tries", 0) + 1
note("tries", tries)
note("argv", [os.fsencode(word).hex() for word in sys.argv[1:]])
note("pid", os.getpid())
came = []
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, lambda number, frame: came.append(number))
count = read("count", 0)
note("begun", read("begun", []) + [count])
print(f"process {me} begins at {count}", flush=True)
print(f"to standard error {me}", file=sys.stderr, flush=True)
limit = 60
behaviour = json.loads((place / "behaviour").read_text()) if (place / "behaviour").exists() else {}
for what in behaviour.get(me, [])[tries - 1 : tries]:  # of this attempt
    if what.startswith("exit "):
        _, status, after = what.split()
        time.sleep(float(after))
        sys.exit(int(status))
    if what == "long":
        limit = 6000
    if what == "chatty":
        for line in range(20_000):
            print("a line of some length that fills a pipe", line, flush=True)
    if what == "stubborn":
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        time.sleep(60)
while count < limit and not came:
    count += 1
    time.sleep(0.05)
if came:
    time.sleep(0.3)  # a second copy of the signal would arrive by now
    note("count", count)
    note("received", read("received", []) + [came])
    sys.exit(128 + came[0])
note("count", count)
print(f"process {me} has counted to {count}", flush=True)
"""


needs_hosts = pytest.mark.skipif(
    importlib.util.find_spec("transformer.parallel.hosts") is None,
    reason="training on many hosts needs transformer/parallel/hosts.py",
)
SETTINGS = {
    "data.source": f"{ROOT}/docs/*.md",
    "model.depth": 1,
    "model.width": 16,
    "train.batch": 4,
    "train.steps": 150,
    "train.eval_every": 150,
    "train.log_every": 5,
    "train.eval_windows": 2,
    "train.checkpoint_every": 150,
    "mesh.data": 2,
}
# A real run that trains for seconds, on two processes of one device each.
TINY = ["--config=experiments/tiny.py", *(f"--config.{name}={value}" for name, value in SETTINGS.items())]


def checkout(home: Path) -> Path:
    """Make it at ``home``, and a Python file for --config; gives ``home``."""
    shutil.copytree(ROOT / "launch", home / "launch", ignore=shutil.ignore_patterns("__pycache__"))
    (home / "transformer").mkdir()
    (home / "transformer" / "__init__.py").touch()
    (home / "transformer" / "__main__.py").write_text(STAND_IN)
    (home / "config.py").write_text("def get_config(): ...\n")
    (home / ".gitignore").write_text("/runs/\n__pycache__/\n")
    subprocess.run(["git", "init", "-q"], cwd=home, check=True)
    return home


def behave(place: Path, **tasks: list[str]) -> None:
    """What the processes do, by ``_NUMBER``, in their first attempt, the second, ...

    "exit STATUS SECONDS" leaves after so long, "long" counts on for minutes, "stubborn" is deaf to signals.
    """
    place.mkdir(parents=True, exist_ok=True)
    (place / "behaviour").write_text(json.dumps({name.strip("_"): what for name, what in tasks.items()}))


# Before a command: tests that run under nohup, or in a shell's background, have some ignored. Not by preexec_fn, which
# makes Python fork, and JAX warns of that wherever another test has loaded it.
DEFAULT_SIGNALS = ("env", "--default-signal=INT,HUP,TERM")


def noted(place: Path, name: str, process: int | str = 0):
    return json.loads((place / f"{name}-{process}").read_text())


def arguments(place: Path, process: int | str = 0) -> list[bytes]:
    return [bytes.fromhex(word) for word in noted(place, "argv", process)]
