"""cost: the bill of a configuration, or of a whole study."""

from pathlib import Path
from typing import Any

from transformer.cli import Args, Command, define_config, say


def run(args: Args) -> tuple[dict[str, Any], str]:
    from transformer.config import call_file
    from transformer.study.study import Study, load

    if args.flags.config and isinstance(call_file(args.flags.config, "get_study", "get_config"), Study):
        return study(load(args.flags.config, args.changes), args)
    experiment = args.experiment()
    from transformer.analysis import cost

    return cost.cost(experiment), cost.text(experiment)


def study(asked: Any, args: Args) -> tuple[dict[str, Any], str]:
    """What each arm takes on this machine, from some steps of it."""
    from transformer.study import price
    from transformer.study.runner import Runner
    from transformer.study.study import resolve, to_json

    runner = Runner(asked, Path(), args.cache, args.argv, say)
    arms = resolve(asked, runner.bytes_per_row)
    hours = runner.price(arms)
    return to_json(asked, arms) | {"hours": hours}, price.text(asked, arms, hours)


COMMAND = Command(
    summary="the bill: parameters, FLOPs, score tables, cache, memory, by part; of a study: hours, by arm",
    example="python -m transformer cost --config=experiments/shakespeare.py --config.model.depth=12",
    define=define_config,
    run=run,
)
