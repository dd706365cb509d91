"""python -m launch WHERE ...: start a run or a study somewhere, follow it, stop it."""

import importlib
import importlib.util
import json
import os
import shlex
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from launch import arguments, arms
from launch.errors import UserError
from launch.job import Job, Place
from launch.tools import ToolError

PLACES = {
    name: f"launch.{name}"
    for name in ("local", "slurm", "cloud_tpu", "gke")
    if importlib.util.find_spec(f"launch.{name}")
}
ACTIONS = {
    "status": "one line: where the job is now",
    "logs": "what the job has printed, and what it prints",
    "stop": "end the job, and delete what was made for it and nothing else",
}

USAGE = """\
usage: python -m launch WHERE [status | logs | stop] --config=FILE.py [flags of WHERE] [all else goes to the job]

Starts `python -m transformer train`, or `study` where FILE.py has get_study, at WHERE; follows it to its end and leaves
with its exit status. All arguments that are not in the lists below reach the job unchanged; what is only nearly one of
the flags there is refused.

example: python -m launch local --config=experiments/shakespeare.py --workdir=runs/demo --dry_run
"""


def main(argv: Sequence[str]) -> int:
    try:
        return launch(list(argv))
    except UserError as error:
        print(f"launch: {error}", file=sys.stderr)
        return 2
    except ToolError as error:
        print(f"launch: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        return 1  # whoever read the log has left


def launch(argv: list[str]) -> int:
    if not argv or "--help" in argv or "-h" in argv:
        sys.stdout.write(usage())
        return 0
    where, *words = argv
    if where not in PLACES:
        raise UserError(f"there is no place {where!r}; there is: {', '.join(PLACES)}")
    action = words.pop(0) if words and words[0] in ACTIONS else "submit"
    place: Place = importlib.import_module(PLACES[where])
    options, rest = arguments.split(words, {**arguments.COMMON, **place.OPTIONS})
    own = {name: options.pop(name) for name in arguments.COMMON}
    job = arguments.make_job(rest, own["name"], own["command"])
    if own["dry_run"] == "true":
        if action != "submit":
            raise UserError(f"--dry_run: {action} has none")
        each = arms.jobs(job) if own["each_arm"] == "true" else {None: job}
        show(where, {arm: (one, place.render(one, options)) for arm, one in each.items()}, "--json" in rest)
        return 0
    if own["each_arm"] == "true":
        return arms.act(where, action, job, words, options)
    if action == "status":
        print(place.status(job, options))
        return 0
    act = {"submit": place.submit, "logs": place.logs, "stop": place.stop}[action]
    return act(job, options)


def show(where: str, rendered: Mapping[str | None, tuple[Job, str]], as_json: bool) -> None:
    """Print what would be run, by arm (None: by the whole job); for JSON a single command is a list."""

    def told(job: Job, text: str) -> dict[str, Any]:
        command = job.command(sys.executable)
        one = text == shlex.join(command)
        return {"where": where, "command": command} if one else {"where": where, "name": job.name, "rendered": text}

    if as_json:
        found = {arm: told(*one) for arm, one in rendered.items()}
        out = json.dumps(found[None] if len(found) == 1 else {"arms": found, **found.pop(None)})
    elif len(rendered) == 1:
        out = rendered[None][1]
    else:
        heads = {arm: f"arm {arm!r}" if arm is not None else "then the comparison" for arm in rendered}
        out = "\n".join(f"# {heads[arm]}: {job.name}\n{text}" for arm, (job, text) in rendered.items())
    sys.stdout.buffer.write(os.fsencode(out + "\n"))  # bytes that are not text pass through too


def usage() -> str:
    lines = [USAGE, *(f"  {name:<24} {about}" for name, about in ACTIONS.items()), "", "everywhere"]
    lines += map(flag, arguments.COMMON.items())
    for name, module in PLACES.items():
        place: Place = importlib.import_module(module)
        lines += ["", f"{name}: {(place.__doc__ or '').splitlines()[0]}", *map(flag, place.OPTIONS.items())]
    return "\n".join(lines) + "\n"


def flag(item: tuple[str, tuple[str | None, str]]) -> str:
    name, (default, about) = item
    head = f"--{name}" if default == "false" else f"--{name}=VALUE"
    tail = " (must be given)" if default is None else f" (default {default})" if default not in ("", "false") else ""
    return f"  {head:<24} {about}{tail}"


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's script has it ignored by what it starts with &
    sys.exit(main(sys.argv[1:]))
