"""study: run a study, and compare."""

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from absl import flags

from transformer.cli import Args, Command, define_config, say
from transformer.errors import UserError
from transformer.parallel import hosts
from transformer.stopping import Stop

if TYPE_CHECKING:
    from transformer.study.runner import Runner


def define(values: flags.FlagValues) -> None:
    define_config(values)
    hosts.define(values)
    flags.DEFINE_string("workdir", None, "the study's directory; the same command goes on with it", flag_values=values)
    flags.DEFINE_list("seeds", None, "instead of the file's: a number of them, or a list", flag_values=values)
    define_lanes(values)
    flags.DEFINE_string(
        "arm", None, "run this arm alone, beside others; the command without it compares them", flag_values=values
    )
    flags.DEFINE_bool("list_arms", False, "print the arms' names, and do nothing", flag_values=values)
    flags.DEFINE_float("budget_hours", None, "instead of the file's; inf for no budget", flag_values=values)
    flags.DEFINE_string("equal", None, "instead of the file's: what is held equal", flag_values=values)


def define_lanes(values: flags.FlagValues) -> None:
    flags.DEFINE_integer(
        "lanes",
        None,
        "runs trained at once, each on a device of its own; as many as there are devices",
        flag_values=values,
    )


def seeds(words: list[str] | None) -> dict[str, tuple[int, ...]]:
    """--seeds=5 is 0, 1, 2, 3, 4; --seeds=3,7 is those two."""
    if not words:
        return {}
    try:
        numbers = tuple(int(word) for word in words)
    except ValueError:
        raise UserError(f"--seeds: {','.join(words)} is neither a number of seeds nor a list of them") from None
    found = tuple(range(numbers[0])) if len(numbers) == 1 else numbers
    if not found or min(found) < 0:
        raise UserError(f"--seeds: {','.join(words)} gives no seeds")
    return {"seeds": found}


def budget(hours: float | None) -> dict[str, float | None]:
    """--budget_hours=inf is none at all."""
    if hours is None:
        return {}
    if not hours > 0:
        raise UserError(f"--budget_hours: {hours:g} is not above 0; inf for no budget")
    return {"budget_hours": None if math.isinf(hours) else hours}


def going_on(runner: "Runner") -> dict[str, Any]:
    """What it finds; where a signal stops it, says that nothing is lost."""
    try:
        return runner.run()
    except Stop:
        say(f"{runner.workdir}: what is done is kept; the same command goes on from there")
        raise


def run(args: Args) -> tuple[dict[str, Any], str]:
    f = args.flags
    if not f.config:
        raise UserError("--config=FILE.py is missing, for example --config=experiments/depth.py")
    workdir = Path() if f.list_arms else args.workdir("the study is", "runs/depth")
    from transformer.study.study import BASELINE, load

    given = {name: f[name].value for name in ("equal", "lanes") if f[name].value is not None}
    study = load(f.config, args.changes, **seeds(f.seeds), **budget(f.budget_hours), **given)
    if f.list_arms:
        names = [BASELINE, *study.changes()]
        return {"arms": names}, "\n".join(names)
    from transformer.study.report import REPORT
    from transformer.study.runner import Failed, Runner, text

    try:
        results = going_on(Runner(study, workdir, args.cache, args.argv, say, f.arm))
    except Failed as failed:
        if failed.results and f.arm is None and not f.json:
            print(f"{text(failed.results)}\n\nthe report: open {workdir / REPORT}")
        raise
    if f.arm is not None:
        return results, f"{f.arm} is done; the same command without --arm compares it with what else is done"
    return results, f"{text(results)}\n\nthe report: open {workdir / REPORT}"


COMMAND = Command(
    summary="run a study: arms x seeds, verdicts, report",
    example="python -m transformer study --config=experiments/depth.py --workdir=runs/depth",
    define=define,
    run=run,
)
