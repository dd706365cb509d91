"""runs: the runs on disk."""

from typing import Any

from absl import flags

from transformer.cli import Args, Command, define_cache, say
from transformer.errors import UserError, did_you_mean

ACTIONS = ("reproduce",)


def define(values: flags.FlagValues) -> None:
    flags.DEFINE_string("action", None, "what to do; it may also be given without the flag", flag_values=values)
    flags.DEFINE_string("run", None, "directory of a trained run", flag_values=values)
    flags.DEFINE_integer("step", None, "reproduce: which step, from 1", flag_values=values)
    define_cache(values)


def run(args: Args) -> tuple[dict[str, Any], str]:
    f = args.flags
    if f.action not in ACTIONS:
        raise UserError(f"runs: {f.action or 'nothing'!r} is no action{did_you_mean(f.action or '', ACTIONS)}")
    directory = args.run_directory()
    if f.step is None:
        raise UserError("--step=N is missing: which step to run again, for example --step=100")
    import jax

    from transformer.analysis.reproduce import reproduce, text
    from transformer.parallel.mesh import make_mesh
    from transformer.run import open_run

    opened = open_run(directory)
    with jax.set_mesh(make_mesh(opened.experiment.mesh)):
        result = reproduce(opened, f.step, args.cache, say)
    return result, text(result)


COMMAND = Command(
    summary="runs on disk: reproduce one step with full diagnostics",
    example="python -m transformer runs reproduce --run=runs/demo --step=100",
    define=define,
    run=run,
    argument="action",
)
