"""No launch of what does not fit: the plan for the machines is asked first."""

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable, Sequence

from launch.errors import UserError


def refuse_unless_it_fits(
    arguments: Sequence[str], topology: str, slices: int, force: bool, say: Callable[[str], None]
) -> None:
    """UserError where the plan of this configuration says that it does not fit, or that it is wrong in itself.

    Where the plan cannot be made, because libtpu is missing, that is said and nothing is refused.
    """
    if force:
        return
    if importlib.util.find_spec("libtpu") is None:
        say("the plan was not checked: libtpu is not installed here (pip install -e '.[plan]')")
        return
    config = [argument for argument in arguments if argument.startswith("--config")]
    command = [sys.executable, "-m", "transformer", "plan", *config, f"--topology={topology}", "--json"]
    command += [f"--slices={slices}"] if slices > 1 else []
    say(f"checking that it fits on {topology}{f' x {slices}' if slices > 1 else ''}")
    planned = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if planned.returncode == 2:
        raise UserError(" ".join(planned.stderr.splitlines()[-1:]))
    try:
        plan = json.loads(planned.stdout)
        fits = plan["fits"]
    except (ValueError, KeyError, TypeError):
        say(f"the plan was not checked: it ended with {' '.join(planned.stderr.splitlines()[-1:]) or 'no result'}")
        return
    if not fits:
        nearest = str(plan.get("nearest", "")).strip()
        raise UserError(
            f"--topology={topology}: the plan says that this does not fit{f'; {nearest}' if nearest else ''}; "
            "--force launches all the same"
        )
