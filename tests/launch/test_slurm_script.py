"""The script of a Slurm job without a Slurm: stand-ins of srun, scontrol and scancel write down what they are given."""

import json
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from launch import slurm, slurm_batch, slurm_script
from launch.errors import UserError
from launch.job import Job
from tests.launch.checkout import checkout

DEFAULTS = {name: default or "" for name, (default, _) in slurm.OPTIONS.items()}

TOOL = """#!{python}
import json, os, sys, time
here = os.path.dirname(os.path.abspath(__file__))
tool = os.path.basename(__file__)
with open(here + "/calls", "a") as calls:
    print(json.dumps([tool, [os.fsencode(word).hex() for word in sys.argv[1:]]]), file=calls)
if tool == "srun":
    for line in json.load(open(here + "/srun.json"))["prints"]:
        print(line, file=sys.stderr, flush=True)
    print("0: a result\\n1: another's\\n 0: more", flush=True)
    sys.exit(json.load(open(here + "/srun.json"))["status"])
if tool == "scontrol" and sys.argv[1] == "show":
    print("JobId=7 JobState=" + os.environ.get("STATE", "RUNNING") + " Reason=None")
"""


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A checkout, as the current directory, and beside it the tools."""
    here = checkout(tmp_path / "it's here")
    (tmp_path / "bin").mkdir()
    for tool in ("srun", "scontrol", "scancel"):
        file = tmp_path / "bin" / tool
        file.write_text(TOOL.format(python=sys.executable))
        file.chmod(file.stat().st_mode | stat.S_IXUSR)
    monkeypatch.chdir(here)
    monkeypatch.setattr(slurm_script.code, "ROOT", here)
    monkeypatch.setattr(slurm_script.code.files, "__defaults__", (here,))
    monkeypatch.setattr(slurm_script.code.archive, "__defaults__", (here,))
    return here


def job(*words: str) -> Job:
    return Job(name="j", arguments=("train", *words))


def run(home: Path, script: str, prints: list[str] = (), status: int = 0, **env: str):
    """Give the script to bash as Slurm does; exit status, what it printed, and the calls of the tools."""
    tools = home.parent / "bin"
    (tools / "calls").write_text("")
    (tools / "srun.json").write_text(json.dumps({"prints": prints, "status": status}))
    (home / "runs/launch/j").mkdir(parents=True, exist_ok=True)
    (home / "runs/launch/j/ended").unlink(missing_ok=True)
    done = subprocess.run(
        ["bash"],
        input=os.fsencode(script),
        env={**os.environ, "PATH": f"{tools}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", **env},
        capture_output=True,
        timeout=60,
    )
    calls = [json.loads(line) for line in (tools / "calls").read_text().splitlines()]
    return done.returncode, done.stderr.decode(), [(name, [bytes.fromhex(w) for w in words]) for name, words in calls]


ARGUMENT = st.one_of(st.text(max_size=12), st.binary(max_size=12).map(os.fsdecode)).map(lambda s: s.replace("\0", ""))
HARD = ["\r\n", "\r", "'\r", "a\n#SBATCH --nodes=9\n", "$(id)", "it's", "", "\\", "\udcff"]


@given(st.lists(st.one_of(st.sampled_from(HARD), ARGUMENT), max_size=5))
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_srun_is_given_the_arguments_unchanged(home, words):
    words = [word for word in words if not word.startswith(("--config", "--workdir"))]
    made = slurm.render(job(*words), DEFAULTS)
    assert "\r\n" not in made, "sbatch refuses this"
    plan = slurm_script.make_plan(job())
    slurm_script.lay_out(plan)
    status, err, calls = run(home, made)
    assert status == 0, err
    name, given_ = calls[0]
    assert name == "srun"
    command = [os.fsencode(word) for word in (sys.executable, "-m", "transformer", "train", *words)]
    assert given_[-len(command) :] == command
    assert (home / "runs/launch/j/ended").read_text() == "7 0"
    assert (home / "runs/launch/j/output").read_text() == "a result\nmore\n"


# Lines that srun prints, its own exit status, SLURM_RESTART_COUNT, and what follows: status, queued again or not.
TASK = "srun: error: node1: task {}: {}"
ENDS = {
    "all is well": ([], 0, "0", (0, False)),
    "saved and left": ([TASK.format(1, "Exited with exit code 143")], 143, "0", (143, True)),
    "killed": ([TASK.format(1, "Killed")], 137, "0", (137, True)),
    "killed, and the others notice": (
        [TASK.format(0, "Killed"), TASK.format(1, "Exited with exit code 1"), TASK.format(2, "Aborted (core dumped)")],
        137,
        "0",
        (137, True),
    ),
    "a user's error, and the others are killed": (
        [TASK.format("0-3", "Exited with exit code 2"), TASK.format("4,6", "Killed")],
        137,
        "0",
        (2, False),
    ),
    "an error": ([TASK.format(0, "Exited with exit code 1")], 1, "0", (1, False)),
    "a crash": ([TASK.format(0, "Segmentation fault (core dumped)")], 139, "0", (139, False)),
    "stopped by the terminal": ([TASK.format(0, "Exited with exit code 130")], 130, "0", (130, False)),
    "srun itself fails": (["srun: error: Unable to create step"], 1, "0", (1, False)),
    "srun is told that the node was lost": (["srun: error: Node failure on node1"], 137, "0", (137, True)),
    "a task that prints what srun would": (["0: " + TASK.format(0, "Exited with exit code 143")], 1, "0", (1, False)),
    "the last attempt": ([TASK.format(0, "Terminated")], 143, "2", (143, False)),
    "the last but one": ([TASK.format(0, "Terminated")], 143, "1", (143, True)),
}


@pytest.mark.parametrize("case", ENDS)
def test_what_an_end_means(home, case):
    prints, srun, restarts, (expected, queued) = ENDS[case]
    slurm_script.lay_out(slurm_script.make_plan(job()))
    made = slurm.render(job(), {**DEFAULTS, "attempts": "3"})
    status, err, calls = run(home, made, prints, srun, SLURM_RESTART_COUNT=restarts)
    assert status == expected, err
    assert (("scontrol", [b"requeue", b"7"]) in calls) == queued
    assert (home / "runs/launch/j/ended").exists() != queued
    for line in prints:
        assert line in err


def test_a_job_that_slurm_itself_started_too_often_is_given_up_without_a_try(home):
    slurm_script.lay_out(slurm_script.make_plan(job()))
    status, err, calls = run(home, slurm.render(job(), {**DEFAULTS, "attempts": "3"}), SLURM_RESTART_COUNT="3")
    assert (status, calls) == (137, []) and "given up" in err
    assert (home / "runs/launch/j/ended").read_text() == "7 137"


@pytest.mark.parametrize("state", ["COMPLETING", "CANCELLED"])
def test_a_cancelled_job_stays_so(home, state):
    slurm_script.lay_out(slurm_script.make_plan(job()))
    lines = [TASK.format(0, "Exited with exit code 143")]
    status, _, calls = run(home, slurm.render(job(), DEFAULTS), lines, 143, STATE=state)
    assert status == 143 and ("scontrol", [b"requeue", b"7"]) not in calls


def directives(**options: str) -> list[str]:
    made = slurm.render(job(), {**DEFAULTS, **options})
    return [line.removeprefix("#SBATCH ") for line in made.splitlines() if line.startswith("#SBATCH ")]


def test_what_is_asked_of_slurm(home):
    quiet = directives()
    assert {"--nodes=1", "--ntasks-per-node=1", "--requeue", "--open-mode=append", "--signal=TERM@120"} <= set(quiet)
    assert not any("gpus" in line or "time" in line or "partition" in line for line in quiet)
    made = directives(nodes="2", gpus_per_node="4", time="1:00:00", sbatch="--mem=64G --comment='a b'", partition="p")
    assert {"--nodes=2", "--ntasks-per-node=4", "--gpus-per-node=4", "--time=1:00:00", "--partition=p"} < set(made)
    assert made[-2:] == ["--mem=64G", '"--comment=a b"']


@pytest.mark.parametrize("tasks, ids", [("1", "0,1,2,3"), ("4", None), ("", None)])
def test_one_process_has_all_gpus_of_its_node_or_each_has_one(home, tasks, ids):
    made = slurm.render(job(), {**DEFAULTS, "gpus_per_node": "4", "tasks_per_node": tasks})
    assert (f"export JAX_LOCAL_DEVICE_IDS={ids}\n" in made) == (ids is not None)
    assert ("JAX_LOCAL_DEVICE_IDS" in made) == (ids is not None)


@pytest.mark.parametrize(
    "words, options, wrong",
    [
        ([], {"gpus_per_node": "4", "tasks_per_node": "3"}, "--tasks_per_node: 3"),
        ([], {"nodes": "0"}, "--nodes: '0'"),
        ([], {"chip_hours": "-1"}, "--chip_hours: '-1'"),
        ([], {"partition": "a\nb"}, "line end"),
        ([], {"sbatch": "--a='b"}, "--sbatch: "),
        ([], {"sbatch": "--mem 64G"}, "--sbatch: "),
        (["--config=none.py"], {}, "--config: none.py"),
        (["--config=../c.py"], {}, "--config: ../c.py"),
        (["--workdir=launch/x"], {}, "--workdir: launch/x"),
        (["--workdir=../x"], {}, "--workdir: ../x"),
        (["--workdir=."], {}, "--workdir: ."),
        (["--workdir=config.py/.."], {}, "--workdir: config.py/.."),
    ],
)
def test_what_is_refused_before_anything_is_queued(home, words, options, wrong):
    with pytest.raises(UserError) as error:
        slurm.render(job(*words), {**DEFAULTS, **options})
    assert wrong in str(error.value)


@pytest.mark.parametrize("workdir", ["runs/x", "./out/../runs/x", "out", "/tmp/x", "~/x", "gs://bucket/x", "configs/x"])
def test_a_relative_workdir_means_the_same_in_the_copy(home, workdir):
    made = slurm_script.make_plan(job("--config=config.py", f"--workdir={workdir}"))
    slurm_script.lay_out(made)
    slurm_script.lay_out(made)
    if not workdir.startswith(("/", "~", "gs:")):
        assert os.path.realpath(made.code / workdir) == str(home / os.path.normpath(workdir))
    assert {entry.name for entry in home.iterdir()} - {"configs", "out", "runs"} == {
        ".git",
        ".gitignore",
        "config.py",
        "launch",
        "transformer",
    }


def test_a_launch_from_a_folder_of_the_checkout_starts_there(home, monkeypatch):
    (home / "mine").mkdir()
    (home / "mine/c.py").write_text("")
    (home / "mine/.gitignore").write_text("/runs/")
    monkeypatch.chdir(home / "mine")
    made = slurm_script.make_plan(job("--config=c.py", "--workdir=runs/x"))
    slurm_script.lay_out(made)
    assert (made.code / made.inside / "c.py").is_file()
    assert os.path.realpath(made.code / made.inside / "runs") == str(home / "mine/runs")
    monkeypatch.chdir(home.parent)
    with pytest.raises(UserError, match="launch from inside"):
        slurm_script.make_plan(job())


def test_git_describes_the_copy_from_within_it(home):
    git = ["git", "-c", "user.name=n", "-c", "user.email=e"]
    subprocess.run([*git, "add", "."], cwd=home, check=True)
    subprocess.run([*git, "commit", "-qm", "m"], cwd=home, check=True)
    (home / "config.py").write_text("changed before the launch\n")
    made = slurm_script.make_plan(job())
    slurm_script.lay_out(made)
    text = slurm_script.script(made, job(), DEFAULTS)
    (home / "config.py").write_text("changed after the launch\n")
    exports = "\n".join(line for line in text.splitlines() if line.startswith(("export GIT", "cd ")))
    out = subprocess.run(["bash", "-c", f"{exports}\ngit diff HEAD"], capture_output=True, check=True, text=True).stdout
    assert "+changed before the launch" in out and "after" not in out


@pytest.mark.parametrize("line", [b"", b"\xff", b"0: srun: error: n: task 0: Killed", b"srun: error: no task"])
def test_lines_that_tell_of_no_failed_task(line):
    assert slurm_batch.failure(line) == 0


def test_without_a_slurm_nothing_is_left_behind(home, monkeypatch, tmp_path):
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "git").symlink_to(shutil.which("git"))
    monkeypatch.setenv("PATH", str(tmp_path / "tools"))
    with pytest.raises(UserError, match=r"^sbatch: not found; launch where Slurm's commands are$"):
        slurm.submit(job(), DEFAULTS)
    assert not (home / "runs").exists()
