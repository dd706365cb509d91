"""runs: the runs on disk."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from absl import flags

from transformer.cli import Args, Command, define_cache, local_path, say
from transformer.errors import UserError, did_you_mean


def define(values: flags.FlagValues) -> None:
    flags.DEFINE_string(
        "action", None, f"{', '.join(ACTIONS)}; it may also be given without the flag", flag_values=values
    )
    flags.DEFINE_multi_string(
        "run", None, "show, diff (twice), reproduce: a run's directory; also without the flag", flag_values=values
    )
    flags.DEFINE_string("root", "runs", "list: where to look, at any depth", flag_values=values)
    flags.DEFINE_multi_string(
        "where", None, "list: such as model.depth=4 or bits_per_byte<2.5; may be repeated", flag_values=values
    )
    flags.DEFINE_string("sort", None, "list: order by this setting or result", flag_values=values)
    flags.DEFINE_integer("step", None, "reproduce: which step, from 1", flag_values=values)
    define_cache(values)


def run(args: Args) -> tuple[dict[str, Any], str]:
    f = args.flags
    if f.action not in ACTIONS:
        raise UserError(f"runs: {f.action or 'nothing'!r} is no action{did_you_mean(f.action or '', ACTIONS)}")
    act, takes, known = ACTIONS[f.action]
    for name in sorted({name for *_, names in ACTIONS.values() for name in names} - set(known)):
        if f[name].present:
            raise UserError(f"--{name}: runs {f.action} has no use for it")
    directories = [local_path("--run", directory) for directory in f.run or []]
    if len(directories) != takes:
        wanted = ("no directory (where to look is --root)", "one run's directory", "two runs' directories")[takes]
        given = ", ".join(map(str, directories)) or "none"
        raise UserError(f"runs {f.action}: takes {wanted}, and was given {given}")
    return act(args, *directories)


def _list(args: Args) -> tuple[dict[str, Any], str]:
    from transformer.study import listing, registry, selection

    root = local_path("--root", args.flags.root)
    known = registry.read_all(root, say)
    chosen = selection.select(known, args.flags.where or [])
    for run in known:
        if not run.settings and run not in chosen:
            say(f"{run.directory}: left out, its settings cannot be read")
    if args.flags.sort:
        chosen = selection.in_order(chosen, args.flags.sort)
    result = listing.listing(root, chosen, len(known))
    return result, listing.list_text(result)


def _show(args: Args, directory: Path) -> tuple[dict[str, Any], str]:
    from transformer.study import listing, registry

    result = listing.show(registry.read_run(directory))
    return result, listing.show_text(result)


def _diff(args: Args, a: Path, b: Path) -> tuple[dict[str, Any], str]:
    from transformer.study import comparison, registry

    result = comparison.diff(registry.read_run(a), registry.read_run(b))
    return result, comparison.diff_text(result)


def _reproduce(args: Args, directory: Path) -> tuple[dict[str, Any], str]:
    step = args.flags.step
    if step is None:
        raise UserError("--step=N is missing: which step to run again, for example --step=100")
    import jax

    from transformer.analysis.reproduce import reproduce, text
    from transformer.parallel.mesh import make_mesh
    from transformer.run import open_run

    opened = open_run(directory)
    with jax.set_mesh(make_mesh(opened.experiment.mesh)):
        result = reproduce(opened, step, args.cache, say)
    return result, text(result)


# What it does, how many runs' directories it takes, and which other flags.
ACTIONS: dict[str, tuple[Callable[..., tuple[dict[str, Any], str]], int, tuple[str, ...]]] = {
    "list": (_list, 0, ("root", "where", "sort")),
    "show": (_show, 1, ()),
    "diff": (_diff, 2, ()),
    "reproduce": (_reproduce, 1, ("step", "cache")),
}

COMMAND = Command(
    summary="runs on disk: list, show, diff, or reproduce one step with full diagnostics",
    example="python -m transformer runs list --where='model.depth>=4' --sort=bits_per_byte",
    define=define,
    run=run,
    argument="action",
    rest="run",
)
