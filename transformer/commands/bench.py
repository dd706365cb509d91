"""bench: speed and memory of this installation, against its limits."""

from typing import Any

from transformer.cli import Args, Command, define_config, say


def run(args: Args) -> tuple[dict[str, Any], str]:
    experiment = args.experiment()
    import jax

    from transformer.analysis.bench import bench, text
    from transformer.parallel.mesh import make_mesh

    with jax.set_mesh(make_mesh(experiment.mesh)):
        result = bench(experiment, say)
    return result, text(result)


COMMAND = Command(
    summary="speed and memory of this installation, against its limits",
    example="python -m transformer bench --config=experiments/shakespeare.py",
    define=define_config,
    run=run,
)
