"""cost: the bill of a configuration."""

from typing import Any

from transformer.cli import Args, Command, define_config


def run(args: Args) -> tuple[dict[str, Any], str]:
    experiment = args.experiment()
    from transformer.analysis import cost

    return cost.cost(experiment), cost.text(experiment)


COMMAND = Command(
    summary="the bill: parameters, FLOPs, score tables, cache, memory, by part",
    example="python -m transformer cost --config=experiments/shakespeare.py --config.model.depth=12",
    define=define_config,
    run=run,
)
