"""evaluate: loss, perplexity and bits per byte of a trained run, or a task's error by difficulty; or benchmarks."""

from pathlib import Path
from typing import Any

from absl import flags

from transformer.cli import Args, Command, define_cache, define_int8, define_run, say
from transformer.errors import UserError
from transformer.parallel import hosts


def define(values: flags.FlagValues) -> None:
    define_run(values)
    define_cache(values)
    hosts.define(values)
    flags.DEFINE_string("text", None, "a text to measure on; by default the run's validation split", flag_values=values)
    define_int8(values)
    flags.DEFINE_integer("stride", None, "tokens between windows; by default half the context", flag_values=values)
    flags.DEFINE_list(
        "tasks", None, "tasks of lm-evaluation-harness, with commas (the extra harness)", flag_values=values
    )
    flags.DEFINE_string("tasks_path", None, "a directory with more tasks as YAML files", flag_values=values)
    flags.DEFINE_integer(
        "shots", None, "examples before each question; by default as the task says", flag_values=values
    )
    flags.DEFINE_integer("limit", None, "of each task only the first questions", flag_values=values)


def run(args: Args) -> tuple[dict[str, Any], str]:
    f = args.flags
    directory = args.run_directory()
    if f.tasks is not None:
        return run_tasks(args, directory)
    for name in ("tasks_path", "shots", "limit"):
        if f[name].value is not None:
            raise UserError(f"--{name}: has no effect without --tasks; leave it out")
    import jax

    from transformer.analysis.measure import measure, measure_held_out, sentence, texts
    from transformer.parallel.mesh import make_mesh
    from transformer.run import open_run

    opened = open_run(directory).on_these_devices()
    with jax.set_mesh(make_mesh(opened.experiment.mesh)):
        params, step = opened.params(f.checkpoint)
        if f.text:
            result = measure(opened, params, step, f.text, texts(opened, f.text), f.stride, f.int8_cache)
        else:
            result = measure_held_out(opened, params, step, args.cache, say, f.stride, f.int8_cache)
    return result, sentence(result)


def run_tasks(args: Args, directory: Path) -> tuple[dict[str, Any], str]:
    """The tasks of a harness."""
    f = args.flags
    for name in ("text", "stride"):
        if f[name].value is not None:
            raise UserError(f"--{name}: has no effect on --tasks; leave it out")
    if hosts.count() > 1:
        raise UserError("--tasks: are measured by one process, not by several")
    try:
        from transformer.analysis import harness
    except ModuleNotFoundError as error:
        raise UserError(
            f"--tasks: needs the package lm-eval, which is not installed (the extra harness): {error}"
        ) from error
    import jax

    from transformer.parallel.mesh import make_mesh
    from transformer.run import open_run

    opened = open_run(directory).on_one_device()
    with jax.set_mesh(make_mesh(opened.experiment.mesh)):
        params, step = opened.params(f.checkpoint)
        result = harness.run_tasks(opened, params, step, f.tasks, f.tasks_path, f.shots, f.limit, f.int8_cache)
    return result, harness.sentence(result)


COMMAND = Command(
    summary="loss, perplexity and bits per byte of the validation split or a text; a task's error; benchmarks",
    example="python -m transformer evaluate --run=runs/demo --text=my.txt",
    define=define,
    run=run,
)
