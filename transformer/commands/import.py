"""import: bring published weights in as a run."""

from pathlib import Path
from typing import Any

from absl import flags

from transformer.cli import Args, Command, local_path, say
from transformer.errors import UserError


def define(values: flags.FlagValues) -> None:
    flags.DEFINE_string(
        "from", None, "a Hugging Face directory (config.json, safetensors), or a .gguf file", flag_values=values
    )
    flags.DEFINE_string("workdir", None, "the directory of the run that is made", flag_values=values)
    flags.DEFINE_string(
        "tokenizer", None, "a tokenizer.json or SentencePiece model; by default what is beside", flag_values=values
    )
    flags.DEFINE_integer("context", None, "positions; by default as many as the model has", flag_values=values)


def run(args: Args) -> tuple[dict[str, Any], str]:
    origin, tokenizer = args.flags["from"].value, args.flags.tokenizer
    if not origin:
        raise UserError("--from=PATH is missing: a Hugging Face directory or a .gguf file")
    workdir = args.workdir("the run is", "runs/imported")
    from transformer.analysis.cost import count_parameters
    from transformer.interop.importing import import_run

    found = import_run(
        local_path("--from", origin),
        workdir,
        Path(tokenizer).expanduser() if tokenizer else None,
        args.flags.context,
        args.argv,
        say,
    )
    parameters = count_parameters(found.experiment)["total"]
    vocabulary = found.published.tokenizer.format
    result = {
        "run": str(workdir),
        "family": found.family.name,
        "parameters": parameters,
        "context": found.experiment.model.context,
        "tokenizer": vocabulary,
    }
    text = (
        f"{workdir}: {found.family.name}, {parameters:,} parameters, context {found.experiment.model.context}, "
        f"tokenizer {vocabulary}\n"
        f"python -m transformer sample --run={workdir} --prompt=... continues a text; to train on from these weights, "
        f"set train.init_from={workdir}"
    )
    return result, text


COMMAND = Command(
    summary="bring published weights in: a Hugging Face directory or a GGUF file becomes a run",
    example="python -m transformer import --from=SmolLM2-135M --workdir=runs/smollm",
    define=define,
    run=run,
)
