"""report: write a run's page."""

from typing import Any

from absl import flags

from transformer.cli import Args, Command


def define(values: flags.FlagValues) -> None:
    flags.DEFINE_string("run", None, "directory of a run; it may also be given without the flag", flag_values=values)


def run(args: Args) -> tuple[dict[str, Any], str]:
    directory = args.run_directory()
    from transformer.analysis.report import write_report

    page = write_report(directory)
    return {"report": str(page)}, f"the report: open {page}"


COMMAND = Command(
    summary="self-contained page of a run",
    example="python -m transformer report runs/demo",
    define=define,
    run=run,
    argument="run",
)
