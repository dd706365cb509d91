"""train: train a model, or go on with the run in the directory."""

from pathlib import Path
from typing import Any

from absl import flags

from transformer.cli import Args, Command, define_config, say
from transformer.parallel import hosts


def define(values: flags.FlagValues) -> None:
    define_config(values)
    hosts.define(values)
    flags.DEFINE_string("workdir", None, "the run's directory; the same command goes on with it", flag_values=values)


def run(args: Args) -> tuple[dict[str, Any], str]:
    experiment = args.experiment()
    workdir = args.workdir("the run is", "runs/first", local=False)
    from transformer.training.loop import train

    train(experiment, workdir, args.cache, args.argv, say)
    return finish(workdir, args.cache)


def finish(workdir: Path, cache: Path) -> tuple[dict[str, Any], str]:
    """Measure the trained model on the whole validation split, continue the configured prompts, write the page.

    Several processes measure together; the first one, on one of its devices, continues the prompts.
    """
    import jax

    from transformer.analysis.examples import show
    from transformer.analysis.measure import EVALUATION, measure_held_out, sentence
    from transformer.analysis.report import write_report
    from transformer.jsons import write_json
    from transformer.parallel.mesh import make_mesh
    from transformer.run import open_run

    run = open_run(workdir).on_these_devices()
    with jax.set_mesh(make_mesh(run.experiment.mesh)):
        params, step = run.params()
        say("measuring on all that was held out")
        result = measure_held_out(run, params, step, cache, say, stride=None)
        write_json(workdir / EVALUATION, result)
    if not hosts.is_first():
        return result, ""
    run = run.on_one_device()
    with jax.set_mesh(make_mesh(run.experiment.mesh, jax.local_devices())):
        if hosts.count() > 1:  # the weights lie on the devices of all
            params, step = run.params(alone=True)
        samples = show(run, params, step)
    page = write_report(workdir)
    texts = [f"--- a sample\n{s.prompt}{s.text}" for s in samples]
    return {**result, "report": str(page)}, "\n\n".join([*texts, sentence(result), f"the report: open {page}"])


COMMAND = Command(
    summary="train, or go on with the run in DIR; the same command resumes it",
    example="python -m transformer train --config=experiments/shakespeare.py --workdir=runs/demo",
    define=define,
    run=run,
)
