"""export: hand a run's weights out as a Hugging Face directory."""

from typing import Any

from absl import flags

from transformer.cli import Args, Command, define_run, local_path
from transformer.errors import UserError


def define(values: flags.FlagValues) -> None:
    define_run(values)
    flags.DEFINE_string("to", None, "the Hugging Face directory that is made", flag_values=values)


def run(args: Args) -> tuple[dict[str, Any], str]:
    directory, to = args.run_directory(), args.flags.to
    if not to:
        raise UserError("--to=DIR is missing: the directory that is made, for example --to=exported")
    from transformer.interop.exporting import export
    from transformer.run import open_run

    result = export(open_run(directory).on_one_device(), local_path("--to", to), args.flags.checkpoint)
    return result, (
        f"{to}: step {result['step']} of {directory}, as a checkpoint of {result['family']}; "
        f"tokenizer: {result['tokenizer']}"
    )


COMMAND = Command(
    summary="hand weights out: a run becomes a Hugging Face directory",
    example="python -m transformer export --run=runs/demo --to=exported",
    define=define,
    run=run,
)
