"""What git says about this project's own checkout."""

import subprocess
from pathlib import Path


def git(*words: str) -> str | None:
    """The output of a git command; None where this is no checkout, or git refuses."""
    here = Path(__file__).parent
    try:
        top = subprocess.run(
            ["git", *words], cwd=here, capture_output=True, text=True, errors="replace", timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return top.stdout.strip()
