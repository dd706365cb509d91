"""Training on two and four real processes that are joined by Gloo; killed, stopped, halted, and started again."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.parallel.several import environment, free_port, job
from tests.runs.whole import ACTS, EXPERIMENT, Result, state_of, text
from transformer.parallel.ending import GONE, LOST

STEPS = 12
MESH = ("--config.mesh.data=2", "--config.mesh.fsdp=2")
# What could go another way on several processes: parts, dropout, Muon's matrices, an evaluation's last rows.
HARD = (
    "--config.train.batch=16",
    "--config.train.accumulate=2",
    "--config.model.dropout=0.1",
    "--config.train.optimizer=muon",
    "--config.train.eval_windows=11",
    "--config.train.log_every=1",
)
TRACE = "--config.train.profile=6,6"
# Every row that a process reads is noted: "step row hash".
ROWS = """
noted = Loader.batch_at

def rows_and_note(self, step, rows=None):
    batch = noted(self, step, rows)
    numbers = range(self.batch) if rows is None else rows
    with open(os.environ["BATCHES"] + ".rows", "a") as file:
        for number, row in zip(numbers, zip(*batch)):
            file.write(f"{step} {number} {hashlib.sha256(b''.join(x.tobytes() for x in row)).hexdigest()}\\n")
    return batch

Loader.batch_at = rows_and_note
"""
# ``DO=LATE:2`` takes so many seconds to read a checkpoint. When that is read, and when the run goes on, is noted.
LATE = """
import orbax.checkpoint as ocp

read, restore = ocp.CompositeCheckpointHandler.restore, Checkpoints.restore

def note(name):
    with open(os.environ["BATCHES"] + name, "a") as file:
        file.write(f"{time.monotonic()}\\n")

def read_and_wait(self, *args, **more):
    found = read(self, *args, **more)
    time.sleep(when if what == "LATE" else 0)
    note(".read")
    return found

def restore_and_note(self, *args):
    found = restore(self, *args)
    note(".went_on")
    return found

ocp.CompositeCheckpointHandler.restore, Checkpoints.restore = read_and_wait, restore_and_note
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hosts")
    (folder / "acts.py").write_text(EXPERIMENT + ACTS + ROWS + LATE)
    (folder / "text.txt").write_text(text(0))
    return folder


def train(home: Path, processes: int, workdir: str, *more: str, **how: Any) -> list[Result]:
    """On four devices in all, with the mesh over them."""
    words = ("train", "--config=acts.py", "--cache=cache", "--json", f"--workdir={workdir}", *MESH, *HARD)
    return job(home, processes, 4 // processes, *words, *more, batches=f"{workdir}_{processes}", **how)


@pytest.fixture(scope="module")
def whole(home: Path) -> list[Result]:
    """Two processes, never stopped."""
    found = train(home, 2, "whole", TRACE)
    assert [r.status for r in found] == [0, 0], found
    return found


@pytest.fixture(scope="module")
def alone(home: Path) -> Result:
    """One process."""
    [found] = train(home, 1, "one", TRACE)
    assert found.status == 0, found.err
    return found


def rows(home: Path, workdir: str, processes: int) -> list[dict[tuple[int, int], str]]:
    """What each process read: the hash of each row of each step."""
    found = []
    for number in range(processes):
        lines = (home / f"{workdir}_{processes}.{number}.batches.rows").read_text().splitlines()
        words = [line.split() for line in lines]
        found.append({(int(step), int(row)): value for step, row, value in words if int(step) < STEPS})
    return found


def records(home: Path, workdir: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (home / workdir / "metrics.jsonl").read_text().splitlines()]


def assert_close(found: Any, wanted: Any) -> None:
    """Same keys, whole numbers and words; numbers to 1e-5."""
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        if isinstance(value, float):
            np.testing.assert_allclose(found[name], value, rtol=1e-5, err_msg=name)
        elif name not in ("run", "report"):
            assert found[name] == value, name


def last_lines(found: list[Result]) -> list[str]:
    return [r.err.splitlines()[-1] for r in found]


def test_two_processes_train_as_one(home: Path, whole: list[Result], alone: Result) -> None:
    """S05, S01: each reads its half of the rows, the losses are those of one process; the first alone speaks.

    With everything that only one of them writes: metrics, evaluations, checkpoints, samples, a trace of one step.
    """
    [everything], halves = rows(home, "one", 1), rows(home, "whole", 2)
    assert not halves[0].keys() & halves[1].keys() and len(halves[0]) == len(halves[1]) == STEPS * 8
    assert halves[0] | halves[1] == everything
    for a, b in zip(records(home, "whole"), records(home, "one"), strict=True):
        assert_close(a, b)
    assert whole[1].out == whole[1].err == "" and whole[0].out.count("\n") == 1
    assert "Gloo" not in whole[0].err and "step 12/12" in whole[0].err
    assert_close(json.loads(whole[0].out), json.loads(alone.out))
    assert sorted(p.name for p in (home / "whole").iterdir()) == sorted(p.name for p in (home / "one").iterdir())
    assert {"profile", "metrics.jsonl", "checkpoints", "samples.json"} <= {p.name for p in (home / "whole").iterdir()}
    assert json.loads((home / "whole" / "provenance.json").read_text())["processes"] == 2


@pytest.mark.exhaustive
def test_all_wait_for_one_that_is_slow_to_read_a_checkpoint(home: Path, whole: list[Result]) -> None:
    """K14: the first one reads for seconds; until then no other goes on, and then all end as if it had not."""
    shutil.copytree(home / "whole", home / "late")
    shutil.rmtree(home / "late" / "checkpoints" / str(STEPS))
    found = train(home, 2, "late", TRACE, do={0: "LATE:2"})
    assert [r.status for r in found] == [0, 0] and "going on after step" in found[0].err, found
    read, went_on = ((home / f"late_2.{name}").read_text().split() for name in ("0.batches.read", "1.batches.went_on"))
    assert float(went_on[0]) > float(read[0])
    assert (home / "late" / "metrics.jsonl").read_bytes() == (home / "whole" / "metrics.jsonl").read_bytes()
    assert state_of(home / "late") == state_of(home / "whole")


@pytest.mark.exhaustive
def test_stopped_and_killed_it_ends_bit_equal(home: Path, whole: list[Result]) -> None:
    """A signal to one saves on all at one step; where one is killed the other leaves with a line, to be tried again."""
    found = train(home, 2, "stopped", do={1: "SIGTERM:1"})
    assert [r.status for r in found] == [143, 143], found
    assert last_lines(found) == ["stopped by SIGTERM"] * 2 and len(found[1].err.splitlines()) == 1
    [saved] = re.findall(r"saved after step (\d+);", found[0].err)
    assert int(saved) in (3, 4) and (home / "stopped" / "checkpoints" / saved).is_dir()
    found = train(home, 2, "stopped", do={1: "SIGKILL:9"})
    assert [r.status for r in found] == [LOST, -9] and last_lines(found[:1])[0].startswith(GONE), found
    assert f"going on after step {saved}" in found[0].err and "Traceback" not in found[0].err
    found = train(home, 2, "stopped")
    assert [r.status for r in found] == [0, 0], found
    assert (home / "stopped" / "metrics.jsonl").read_bytes() == (home / "whole" / "metrics.jsonl").read_bytes()
    assert state_of(home / "stopped") == state_of(home / "whole")
    for name in ("evaluation.json", "samples.json"):
        wanted = (home / "whole" / name).read_text().replace('"run": "whole"', '"run": "stopped"')
        assert (home / "stopped" / name).read_text() == wanted
    assert rows(home, "stopped", 2) == rows(home, "whole", 2)


@pytest.mark.exhaustive
def test_process_0_may_be_the_one(home: Path) -> None:
    """It has the store by which the others would hear of it."""
    found = train(home, 2, "first", do={0: "SIGKILL:3"})
    assert [r.status for r in found] == [-9, LOST] and found[1].err == f"{GONE}\n", found


@pytest.mark.exhaustive
def test_another_number_of_processes_goes_on(home: Path, whole: list[Result], alone: Result) -> None:
    """Two, one, four: the same rows, and the first loss of each as of a run on two."""
    wanted = {r["step"]: r["loss"] for r in records(home, "whole") if "loss" in r}
    for processes, do in ((2, {0: "SIGTERM:2"}), (1, {0: "SIGTERM:6"}), (4, None)):
        found = train(home, processes, "moved", do=do)
        assert {r.status for r in found} == ({143} if do else {0}), found
    starts = json.loads((home / "moved" / "provenance.json").read_text())
    resumed = [start["resumed_at_step"] for start in [*starts["earlier"], starts]]
    assert resumed[0] == 0 and 3 <= resumed[1] < 6 <= resumed[2] < STEPS
    losses = {r["step"]: r["loss"] for r in records(home, "moved") if "loss" in r}
    assert losses.keys() == wanted.keys()
    for step in resumed:
        np.testing.assert_allclose(losses[step + 1], wanted[step + 1], rtol=1e-5)
    read = {key: value for part in rows(home, "moved", 4) for key, value in part.items()}
    [everything] = rows(home, "one", 1)
    assert read == {key: value for key, value in everything.items() if key[0] >= resumed[2]}


@pytest.mark.parametrize(
    ("process", "do", "status", "words"),
    [
        pytest.param(1, "RAISE:4", 1, "failed: ValueError: something broke", marks=pytest.mark.exhaustive),
        pytest.param(0, "FULL:4", 1, "failed: OSError: ", marks=pytest.mark.exhaustive),
        (1, "SLEEP:4", LOST, "no step finished in 4 s"),
    ],
    ids=["error", "full disk", "hang"],
)
def test_what_ends_one_ends_all(home: Path, process: int, do: str, status: int, words: str) -> None:
    """S02, K02: with its status and its line, and nothing hangs."""
    found = train(home, 2, do.partition(":")[0], "--step_timeout=4", do={process: do}, limit=90)
    assert [r.status for r in found] == [status, status], found
    assert all(words in line for line in last_lines(found)), found
    assert len(found[1].err.splitlines()) == 1 and "Traceback" not in found[0].err
    if status == 1:
        assert last_lines(found)[1 - process].startswith(f"process {process}: ")


def test_several_processes_measure_as_one(home: Path, whole: list[Result]) -> None:
    """On two with the run's mesh and on four with another, the last rows not full."""
    wanted = json.loads((home / "whole" / "evaluation.json").read_text())
    for processes, devices in ((2, 2), (4, 2)):
        found = job(home, processes, devices, "evaluate", "--run=whole", "--cache=cache", "--json")
        assert [r.status for r in found] == [0] * processes, found
        assert_close(json.loads(found[0].out), wanted)
        assert all(r.out == "" and r.err == "" for r in found[1:])


def test_a_users_error_is_one_line_for_each(home: Path) -> None:
    found = train(home, 2, "wrong", "--config.data.source=nowhere.txt")
    assert [r.status for r in found] == [2, 2] and not (home / "wrong").exists()
    assert all(len(r.err.splitlines()) == 1 and "nowhere.txt" in r.err for r in found), found
    found = job(home, 2, 2, "train", "--config=acts.py", "--cache=cache", "--workdir=small", "--config.mesh.data=2")
    assert [r.status for r in found] == [2, 2] and "a mesh takes all of them" in found[0].err, found


# By environment variables, as JAX finds them: what starts a process of a cluster sets them.
SLURM = {"SLURM_JOB_ID": "7", "SLURM_STEP_NODELIST": "127.0.0.1", "SLURM_NTASKS": "2", "SLURM_LOCALID": "0"}
GKE = {"JAX_FORCE_TPU_INIT": "1", "TPU_WORKER_HOSTNAMES": "127.0.0.1", "TPU_WORKER_ID": "0", "TPU_SKIP_MDS_QUERY": "1"}
GKE |= {"MEGASCALE_COORDINATOR_ADDRESS": "127.0.0.1", "MEGASCALE_NUM_SLICES": "2"}
JOIN = """
from absl import flags
from transformer.parallel import ending, hosts
values = flags.FlagValues()
hosts.define(values)
flags.DEFINE_bool("debug", False, "", flag_values=values)
values(["join"])
hosts.start(values)
import jax
print(hosts.count(), hosts.is_first(), hosts.agree(lambda: {"x": [1, None]}), jax.process_count())
hosts.barrier("here")
ending.leave(0, "")
"""


@pytest.mark.parametrize(
    ("cluster", "rank"), [(SLURM, "SLURM_PROCID"), (GKE, "MEGASCALE_SLICE_ID")], ids=["slurm", "gke"]
)
def test_a_cluster_is_found_by_itself(home: Path, cluster: dict[str, str], rank: str) -> None:
    port = str(free_port())
    started = []
    for number in range(2):
        environ = environment(home, 1, JAX_COORDINATOR_PORT=port, **cluster, **{rank: str(number)})
        started.append(subprocess.Popen([sys.executable, "-c", JOIN], env=environ, stdout=subprocess.PIPE, text=True))
    said = [process.communicate(timeout=60)[0] for process in started]
    assert said == ["2 True {'x': [1, None]} 2\n", "2 False {'x': [1, None]} 2\n"]


def test_a_process_by_itself_waits_for_nobody(home: Path) -> None:
    alone = subprocess.run([sys.executable, "-c", JOIN], env=environment(home, 1), capture_output=True, timeout=60)
    assert alone.stdout.decode() == "1 True {'x': [1, None]} 1\n"
