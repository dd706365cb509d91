"""evaluate: loss, perplexity and bits per byte of a trained run, or a task's error by difficulty."""

from typing import Any

from absl import flags

from transformer.cli import Args, Command, define_cache, define_int8, define_run, say
from transformer.parallel import hosts


def define(values: flags.FlagValues) -> None:
    define_run(values)
    define_cache(values)
    hosts.define(values)
    flags.DEFINE_string("text", None, "a text to measure on; by default the run's validation split", flag_values=values)
    define_int8(values)
    flags.DEFINE_integer("stride", None, "tokens between windows; by default half the context", flag_values=values)


def run(args: Args) -> tuple[dict[str, Any], str]:
    f = args.flags
    directory = args.run_directory()
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


COMMAND = Command(
    summary="loss, perplexity and bits per byte of the validation split or a text; a task's error",
    example="python -m transformer evaluate --run=runs/demo --text=my.txt",
    define=define,
    run=run,
)
