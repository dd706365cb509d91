"""What a Slurm job is made of: the copy of the code that it runs, and its script.

Everything of a job lies in runs/launch/NAME, on a file system that all nodes see. The code lies beside, as it was
launched, in a directory named by its hash; what lies in the checkout and is not code is there as a link.
"""

import os
import re
import shlex
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from launch import code
from launch.arguments import positive, value_of, whole
from launch.errors import UserError
from launch.job import Job

NOTICE = 120  # seconds before the time limit at which the tasks are sent SIGTERM, to save
WORD = re.compile(r"[A-Za-z0-9_@%+=:,./\[\]*&|!-]*")  # in a directive, nothing to be quoted


def directory(job: Job) -> Path:
    return Path.cwd() / "runs" / "launch" / job.name


@dataclass(frozen=True)
class Plan:
    """Where everything of a job is, or will be."""

    directory: Path  # the job's own
    packed: bytes  # the code
    archive: Path  # where it is kept, packed
    code: Path  # and unpacked
    inside: Path  # where in the code the job starts: where in the checkout the launch is
    outputs: str | None  # of a relative --workdir, the directory here that it begins with


def make_plan(job: Job) -> Plan:
    """Nothing is written. UserError where the job's relative paths would not mean the same in the copy."""
    here = Path.cwd()
    if not here.is_relative_to(code.ROOT):
        raise UserError(f"{here}: launch from inside {code.ROOT}, whose code the job runs")
    inside = here.relative_to(code.ROOT)
    names = [str(name) for name in code.files()]
    config = value_of("config", job.arguments)
    if config and not Path(config).is_absolute() and os.path.normpath(inside / config) not in names:
        raise UserError(f"--config: {config} is not among the code of {code.ROOT}, or git ignores it")
    workdir, outputs = value_of("workdir", job.arguments), None
    if workdir and not workdir.startswith(("/", "~")) and "://" not in workdir:
        outputs = os.path.normpath(workdir).split(os.sep)[0]
        first = str(inside / outputs)
        if outputs in ("..", ".") or any(name == first or name.startswith(f"{first}/") for name in names):
            raise UserError(f"--workdir: {workdir} would be inside the copy of the code; write {here / workdir}")
    packed, digest = code.archive()
    kept = here / "runs" / "launch" / ".code" / digest[:16]
    return Plan(directory(job), packed, kept.with_suffix(".tar.gz"), kept, inside, outputs)


def lay_out(plan: Plan) -> None:
    """Write the code; beside it, links to all that lies where the launch is and is not code."""
    plan.archive.parent.mkdir(parents=True, exist_ok=True)
    part = plan.archive.with_name(f".{os.getpid()}.part")
    part.write_bytes(plan.packed)
    part.replace(plan.archive)  # at once: a job with the same code may be reading it
    code.unpack(plan.packed, plan.code)
    here = Path.cwd()
    if plan.outputs:
        (here / plan.outputs).mkdir(exist_ok=True)
    for entry in here.iterdir():
        link = plan.code / plan.inside / entry.name
        if entry.name != ".git" and not os.path.lexists(link):
            link.symlink_to(entry)


def script(plan: Plan, job: Job, options: Mapping[str, str]) -> str:
    """What sbatch is given."""
    nodes, gpus = whole(options, "nodes"), whole(options, "gpus_per_node", least=0)
    tasks = whole(options, "tasks_per_node") if options["tasks_per_node"] else max(gpus, 1)
    if gpus and tasks not in (1, gpus):
        raise UserError(f"--tasks_per_node: {tasks} processes do not share {gpus} GPUs evenly; use 1 or {gpus}")
    directives = {
        "job-name": job.name,
        "nodes": nodes,
        "ntasks-per-node": tasks,
        "gpus-per-node": gpus or "",
        "cpus-per-task": whole(options, "cpus_per_task") if options["cpus_per_task"] else "",
        "time": options["time"],
        "partition": options["partition"],
        "account": options["account"],
        "output": f"{plan.directory}/%j.log".replace("%", "%%").replace("%%j.log", "%j.log"),
        "open-mode": "append",
        "requeue": None,
        "signal": f"TERM@{NOTICE}",
    }
    lines = [f"--{name}" if value is None else f"--{name}={value}" for name, value in directives.items() if value != ""]
    batch = {
        "directory": plan.directory,
        "archive": plan.archive,
        "attempts": whole(options, "attempts"),
        "chips": nodes * max(gpus, 1),
        "chip_hours": f"{positive(options, 'chip_hours'):g}",
    }
    flags = shlex.join(f"--{name}={value}" for name, value in batch.items())
    srun = ["srun", "--label", "--kill-on-bad-exit=0", "--wait=0"]
    if options["cpus_per_task"]:
        srun.append(f"--cpus-per-task={options['cpus_per_task']}")  # not taken over from the job since Slurm 22.05
    python = options["python"]
    exports = {"PYTHONPATH": plan.code, **_git(plan)}
    if gpus > tasks:
        exports["JAX_LOCAL_DEVICE_IDS"] = ",".join(map(str, range(gpus)))  # else JAX gives each process one GPU
    return "\n".join(
        [
            "#!/bin/bash",
            *(f"#SBATCH {_directive(line)}" for line in lines + _further(options["sbatch"])),
            "",
            *(f"export {name}={_quote(str(value))}" for name, value in exports.items()),
            # A GPU that is not found is an error; cpu comes from the machine that the job was launched on.
            *(['[ "${JAX_PLATFORMS:-cpu}" != cpu ] || export JAX_PLATFORMS=cuda,cpu'] if gpus else []),
            f"cd {_quote(str(plan.code / plan.inside))} || exit 2",
            f"exec {_quote(python)} -m launch.slurm_batch {flags} -- \\",
            f"    {shlex.join(srun)} \\",
            f"    {' '.join(map(_quote, job.command(python)))}",
        ]
    )


def _git(plan: Plan) -> dict[str, object]:
    """With these, a run's record of commit and changes is that of the copy, whatever becomes of the checkout."""
    found = subprocess.run(["git", "rev-parse", "--absolute-git-dir"], cwd=code.ROOT, capture_output=True)
    return {"GIT_DIR": os.fsdecode(found.stdout).removesuffix("\n"), "GIT_WORK_TREE": plan.code}


def _further(text: str) -> list[str]:
    try:
        words = shlex.split(text)
    except ValueError:
        words = [""]
    if not all(word.startswith("-") for word in words):
        raise UserError(f"--sbatch: {text!r} is not a list of options; write --sbatch='--mem=64G --constraint=a100'")
    return words


def _directive(option: str) -> str:
    if "\n" in option or "\r" in option:
        raise UserError(f"{option!r}: a line end cannot stand in an option of sbatch")
    if WORD.fullmatch(option):
        return option
    return '"' + re.sub(r'(["\\])', r"\\\1", option) + '"'


def _quote(word: str) -> str:
    """As bash reads it. sbatch refuses scripts with the line ends of DOS, so a carriage return is written out."""
    return r"$'\r'".join(shlex.quote(part) for part in word.split("\r")) if "\r" in word else shlex.quote(word)
