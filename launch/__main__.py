"""python -m launch WHERE ...: start a run or a study somewhere, follow it, stop it."""

import importlib
import importlib.util
import json
import os
import shlex
import signal
import sys
from collections.abc import Sequence

from launch import arguments
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
        show(where, job, place.render(job, options), "--json" in rest)
        return 0
    if action == "status":
        print(place.status(job, options))
        return 0
    act = {"submit": place.submit, "logs": place.logs, "stop": place.stop}[action]
    return act(job, options)


def show(where: str, job: Job, rendered: str, as_json: bool) -> None:
    """Print what would be run; for JSON a single command is a list."""
    command = job.command(sys.executable)
    if as_json and rendered == shlex.join(command):
        rendered = json.dumps({"where": where, "command": command})
    elif as_json:
        rendered = json.dumps({"where": where, "name": job.name, "rendered": rendered})
    sys.stdout.buffer.write(os.fsencode(rendered + "\n"))  # bytes that are not text pass through too


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
