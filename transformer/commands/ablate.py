"""ablate: what each block, head and MLP of a trained run is worth."""

from typing import Any

from absl import flags

from transformer.cli import Args, Command, define_cache, define_run, say
from transformer.errors import UserError
from transformer.files import check_writable


def define(values: flags.FlagValues) -> None:
    define_run(values)
    define_cache(values)
    flags.DEFINE_string("text", None, "a text to measure on; by default the run's validation split", flag_values=values)
    flags.DEFINE_integer(
        "windows", None, "how many windows of the text; by default the run's train.eval_windows", flag_values=values
    )


def run(args: Args) -> tuple[dict[str, Any], str]:
    f = args.flags
    directory = args.run_directory()
    check_writable(directory)
    if f.windows is not None and f.windows < 1:
        raise UserError(f"--windows: {f.windows} is too small, set 1 or more")
    import jax

    from transformer.analysis.ablation import ABLATION, ablate
    from transformer.analysis.ablation_figure import sentence
    from transformer.analysis.measure import texts, validation
    from transformer.analysis.report import write_report
    from transformer.data.documents import token_sizes
    from transformer.jsons import write_json
    from transformer.parallel.mesh import Mesh, make_mesh
    from transformer.run import open_run

    opened = open_run(directory).of_text().on_one_device()
    count = opened.experiment.train.eval_windows if f.windows is None else f.windows
    with jax.set_mesh(make_mesh(Mesh())):
        params, step = opened.params(f.checkpoint)
        documents = texts(opened, f.text) if f.text else validation(opened, args.cache, say)
        found = ablate(opened.experiment, params, documents, token_sizes(opened.tokenizer), count=count, say=say)
    result = {"run": str(directory), "step": step, "text": f.text or "validation split", **found}
    write_json(directory / ABLATION, result)
    page = write_report(directory)
    return result, f"{sentence(result)}\n\nthe figure: open {page}"


COMMAND = Command(
    summary="what each block, head and MLP is worth: bits per byte without it",
    example="python -m transformer ablate --run=runs/demo",
    define=define,
    run=run,
)
