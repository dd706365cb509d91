"""inspect: the whole model on one prompt, as a page or in the terminal."""

import sys
from pathlib import Path
from typing import Any

from absl import flags

from transformer.cli import Args, Command, define_cache, define_run, local_path
from transformer.errors import UserError
from transformer.files import check_writable


def define(values: flags.FlagValues) -> None:
    define_run(values)
    define_cache(values)
    flags.DEFINE_string("prompt", None, "the text that goes through the model; may be empty", flag_values=values)
    flags.DEFINE_string("out", None, "page to write; without it the chain is drawn in the terminal", flag_values=values)
    flags.DEFINE_string("compare", None, "directory of a second run, beside the first one", flag_values=values)
    flags.DEFINE_integer(
        "position", None, "whose way is drawn at first, from 0; by default the last", flag_values=values
    )


def run(args: Args) -> tuple[dict[str, Any], str]:
    f = args.flags
    directories = {"--run": args.run_directory()}
    if f.prompt is None:
        raise UserError("--prompt=TEXT is missing: what goes through the model, for example --prompt='HAMLET. '")
    if f.compare is not None:
        from transformer.files import where

        directories["--compare"] = where("--compare", f.compare)
    page = check_page(f.out)
    import jax

    from transformer.analysis.inspection import as_dict, inspect
    from transformer.parallel.mesh import Mesh, make_mesh
    from transformer.run import open_run

    found = []
    with jax.set_mesh(make_mesh(Mesh())):
        for flag, directory in directories.items():
            opened = open_run(directory).of_text(flag).on_one_device()
            params, step = opened.params(f.checkpoint)
            found.append(inspect(opened, params, step, f.prompt))
    length = len(found[0].tokens)
    position = length - 1 if f.position is None else f.position
    if not 0 <= position < length:
        raise UserError(f"--position: {position} is not one of the prompt's positions, 0 to {length - 1}")
    if page is not None:
        from transformer.analysis.inspect_page import write_inspection

        write_inspection(page, found, position)
    result = {"page": str(page) if page else None, "models": [as_dict(x) for x in found]} if f.json else {}
    if page is not None:
        return result, f"the model on this prompt: open {page}"
    if f.json:
        return result, ""
    from transformer.analysis.inspect_terminal import drawn

    return result, "\n\n".join(drawn(x, position, colour=sys.stdout.isatty()) for x in found)


def check_page(out: str | None) -> Path | None:
    """Where the page goes, checked before any work."""
    if out is None:
        return None
    page = local_path("--out", out)
    if page.is_dir() or page.suffix.lower() not in (".html", ".htm"):
        raise UserError(f"--out: {out} is not a page's name, for example --out=page.html")
    if not page.parent.is_dir():
        raise UserError(f"--out: {page.parent} is not a directory")
    check_writable(page.parent)
    return page


COMMAND = Command(
    summary="the whole model on one prompt, as a page",
    example="python -m transformer inspect --run=runs/demo --prompt='To be, or not to be' --out=page.html",
    define=define,
    run=run,
)
