"""python -m launch WHERE ...: start a training run somewhere."""

import json
import os
import shlex
import sys
from collections.abc import Sequence

from launch import local

PLACES = {"local": local}  # a place offers command(arguments) and run(arguments)

USAGE = """\
usage: python -m launch WHERE --config=FILE.py [--config.NAME.NAME=VALUE ...] [--workdir=DIR] [--dry_run]

Starts `python -m transformer train` with these arguments, unchanged, at WHERE:
  local    this machine; signals go to the run, and its exit status comes back

--dry_run  print the exact command, ready to paste into a shell, and do nothing
           (with --json, print it as one JSON object)

example: python -m launch local --config=experiments/shakespeare.py --workdir=runs/demo --dry_run
"""


def main(argv: Sequence[str]) -> int:
    if not argv or "--help" in argv or "-h" in argv:
        sys.stdout.write(USAGE)
        return 0
    where, arguments = argv[0], [argument for argument in argv[1:] if argument != "--dry_run"]
    if where not in PLACES:
        print(f"launch: there is no place {where!r}; there is: {', '.join(PLACES)}", file=sys.stderr)
        return 2
    place = PLACES[where]
    if "--dry_run" not in argv:
        return place.run(arguments)
    command = place.command(arguments)
    line = json.dumps({"where": where, "command": command}) if "--json" in arguments else shlex.join(command)
    sys.stdout.buffer.write(os.fsencode(line + "\n"))  # bytes that are not text pass through too
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
