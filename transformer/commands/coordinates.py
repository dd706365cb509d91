"""coordinates: does a parametrisation hold over width and depth? How far some steps move each part of the model."""

from typing import Any

from absl import flags

from transformer.cli import Args, Command, define_config, say
from transformer.errors import UserError


def define(values: flags.FlagValues) -> None:
    define_config(values)
    flags.DEFINE_list("widths", [], "model widths, at the configuration's depth: 64,128,256", flag_values=values)
    flags.DEFINE_list("depths", ["2", "4", "8", "16", "32", "64"], "depths, at its width", flag_values=values)
    flags.DEFINE_integer("steps", 5, "updates", flag_values=values)


def sizes(flag: str, words: list[str]) -> list[int]:
    """Different whole numbers above 0, in rising order."""
    if not all(word.isdecimal() and int(word) for word in words) or len(set(map(int, words))) < len(words):
        raise UserError(f"--{flag}: {','.join(words)} are not different whole numbers above 0")
    return sorted(map(int, words))


def run(args: Args) -> tuple[dict[str, Any], str]:
    f = args.flags
    widths, depths = sizes("widths", f.widths), sizes("depths", f.depths)
    if f.steps < 1:
        raise UserError(f"--steps: {f.steps} is too small, set 1 or more")
    experiment = args.experiment()
    from transformer.analysis import coordinates

    result = coordinates.coordinates(experiment, widths, depths, f.steps, say)
    return result, coordinates.text(result)


COMMAND = Command(
    summary="does a parametrisation hold? how far some steps move each part, over widths and depths",
    example="python -m transformer coordinates --config=experiments/tiny.py --config.model.parametrisation=completep",
    define=define,
    run=run,
)
