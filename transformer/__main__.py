"""python -m transformer COMMAND ..."""

import logging
import sys
import threading

try:
    from transformer.allocator import keep_freed_memory
    from transformer.cli import main
    from transformer.stopping import leave_soon
except ModuleNotFoundError as error:
    print(
        f"error: {error.name} is not installed for {sys.executable}; after `make demo` there is a Python that has all: "
        f".venv/bin/python -m transformer ...",
        file=sys.stderr,
    )
    sys.exit(2)

NAMES = (
    *("train", "study", "noise"),
    *("sample", "evaluate", "inspect", "ablate"),
    *("cost", "plan", "bench", "coordinates"),
    *("report", "runs", "import", "export"),
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
    status = main(COMMANDS, sys.argv[1:])
    if status > 128:
        leave_soon(status)
    sys.exit(status)
