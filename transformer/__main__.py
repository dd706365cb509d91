"""python -m transformer COMMAND ..."""

import sys

from transformer.cli import main

COMMANDS = {name: f"transformer.commands.{name}" for name in ("train", "sample", "evaluate", "cost", "report", "bench")}

if __name__ == "__main__":
    sys.exit(main(COMMANDS, sys.argv[1:]))
