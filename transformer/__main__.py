"""python -m transformer COMMAND ..."""

import logging
import sys
import threading

from transformer.allocator import keep_freed_memory
from transformer.cli import main

NAMES = (
    *("train", "study", "noise", "sample", "evaluate", "inspect", "ablate"),
    *("cost", "plan", "report", "runs", "bench"),
)
COMMANDS = {name: f"transformer.commands.{name}" for name in NAMES}

if __name__ == "__main__":
    if not any(word.lstrip("-").startswith("debug") for word in sys.argv):
        # ``main`` says what went wrong in one line; libraries' threads print pages about the same thing after it.
        sys.excepthook = lambda *error: None
        sys.unraisablehook = lambda error: None
        threading.excepthook = lambda error: None
        logging.getLogger("asyncio").setLevel(logging.CRITICAL)
    keep_freed_memory()
    sys.exit(main(COMMANDS, sys.argv[1:]))
