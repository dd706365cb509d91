"""report: write the page of a run or a study."""

from typing import Any

from absl import flags

from transformer.cli import Args, Command
from transformer.files import STUDY, check_writable


def define(values: flags.FlagValues) -> None:
    flags.DEFINE_string(
        "run", None, "directory of a run or a study; it may also be given without the flag", flag_values=values
    )


def run(args: Args) -> tuple[dict[str, Any], str]:
    directory = args.run_directory()
    check_writable(directory)
    if (directory / STUDY).is_file():
        from transformer.study.report import write_report
    else:
        from transformer.analysis.report import write_report
    page = write_report(directory)
    return {"report": str(page)}, f"the report: open {page}"


COMMAND = Command(
    summary="self-contained page of a run or a study",
    example="python -m transformer report runs/demo",
    define=define,
    run=run,
    argument="run",
)
