"""noise: repeat one configuration, and say what its seeds alone do."""

from typing import Any

from absl import flags

from transformer.cli import Args, Command, define_config, say
from transformer.commands.study import define_lanes, going_on, seeds
from transformer.errors import UserError
from transformer.parallel import hosts


def define(values: flags.FlagValues) -> None:
    define_config(values)
    hosts.define(values)
    flags.DEFINE_string(
        "workdir", None, "where the runs are kept; the same command goes on with them", flag_values=values
    )
    flags.DEFINE_list("seeds", ["5"], "a number of seeds, or a list", flag_values=values)
    define_lanes(values)
    flags.DEFINE_float("effect", None, "a difference that is worth finding: how many seeds find it", flag_values=values)
    flags.DEFINE_integer("arms", 1, "of the study that is to find it, besides the baseline", flag_values=values)


def run(args: Args) -> tuple[dict[str, Any], str]:
    f = args.flags
    if not f.config:
        raise UserError("--config=FILE.py is missing, for example --config=experiments/tiny.py")
    workdir = args.workdir("the runs are", "runs/noise")
    if f.effect is not None and f.effect <= 0:
        raise UserError(f"--effect: {f.effect} is not above 0")
    if f.arms < 1:
        raise UserError(f"--arms: {f.arms} is not 1 or more")
    chosen = seeds(f.seeds)
    if len(chosen.get("seeds", (0, 1))) < 2:
        raise UserError(f"--seeds: {','.join(f.seeds)} is one seed, and two are needed to differ; add seeds")
    from transformer.study.study import repeat

    study = repeat(f.config, args.changes, **chosen, **({} if f.lanes is None else {"lanes": f.lanes}))
    from transformer.study.noise import noise
    from transformer.study.runner import Runner
    from transformer.study.study import UNITS

    found = going_on(Runner(study, workdir, args.cache, args.argv, say))
    values = {int(seed): row and row.get(study.metric) for seed, row in found["arms"][0]["seeds"].items()}
    floor = noise(values)
    unit = UNITS[study.metric]
    result, text = floor.as_dict() | {"values": values}, floor.in_words(unit)
    if f.effect is not None:
        needed = floor.seeds_needed(f.effect, f.arms)
        result |= {"effect": f.effect, "arms": f.arms, "seeds_needed": needed}
        text += f"\nto find {f.effect:g} {unit} among {f.arms} arms: {needed or 'more than 1000'} seeds"
    return result, text


COMMAND = Command(
    summary="repeat one configuration: noise floor, seeds needed for a wanted effect",
    example="python -m transformer noise --config=experiments/tiny.py --workdir=runs/noise --effect=0.01",
    define=define,
    run=run,
)
