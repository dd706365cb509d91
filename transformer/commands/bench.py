"""bench: speed and memory of this installation, against its limits and its peers."""

from typing import Any

from absl import flags

from transformer.cli import Args, Command, define_config, say
from transformer.errors import UserError


def define(values: flags.FlagValues) -> None:
    define_config(values)
    flags.DEFINE_list(
        "parts", [], "of the standard comparison: train, generate, ...; all but kinds", flag_values=values
    )
    flags.DEFINE_list("sizes", [], "of the standard comparison: S, M, L; all", flag_values=values)


def run(args: Args) -> tuple[dict[str, Any], str]:
    f = args.flags
    if not f.config:
        if args.changes:
            raise UserError(f"--config.{next(iter(args.changes))}: has no effect without --config=FILE.py")
        from transformer.analysis import suite

        result = suite.suite(f.parts or suite.PARTS, f.sizes or tuple(suite.SIZES), say)
        return result, suite.text(result)
    if f.parts or f.sizes:
        raise UserError("--parts and --sizes have no effect with --config: they are of the standard comparison")
    experiment = args.experiment()
    import jax

    from transformer.analysis.bench import bench, text
    from transformer.parallel.mesh import make_mesh

    with jax.set_mesh(make_mesh(experiment.mesh)):
        result = bench(experiment, say)
    return result, text(result)


COMMAND = Command(
    summary="speed and memory: of three standard sizes beside limits and peers, or of an experiment",
    example="python -m transformer bench --config=experiments/shakespeare.py",
    define=define,
    run=run,
)
