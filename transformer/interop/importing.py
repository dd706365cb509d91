"""Bring published weights in: an ordinary run, of step 0, made beside and renamed when whole."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax

from transformer import config, files
from transformer.config import Experiment
from transformer.errors import UserError
from transformer.interop import families, vocabulary, weights
from transformer.interop.common import Family
from transformer.interop.directory import whole
from transformer.interop.keys import Keys
from transformer.interop.source import CONFIG, Safetensors, Source, config_of
from transformer.jsons import write_json
from transformer.model.positions import Learned
from transformer.parallel.mesh import Mesh, make_mesh
from transformer.run import now, provenance
from transformer.settings import to_dict
from transformer.training.checkpoint import Checkpoints
from transformer.training.state import declarations


class Published(NamedTuple):
    """What was published: settings as a config.json has them, tensors, and where a tokenizer is looked for."""

    config: dict[str, Any]
    source: Source
    tokenizer: vocabulary.Vocabulary


class Found(NamedTuple):
    """A published model, checked, its tensors not yet read."""

    family: Family
    experiment: Experiment
    published: Published


def open_published(origin: Path, tokenizer: Path | None) -> Published:
    if origin.suffix == ".gguf":
        from transformer.interop import gguf_file

        return gguf_file.open_file(origin, tokenizer)
    if origin.is_file():
        raise UserError(f"--from: {origin} is a file; name a Hugging Face directory, or a file that ends in .gguf")
    if not origin.is_dir():
        raise UserError(f"--from: there is no directory {origin}")
    values = config_of(origin)
    return Published(values, Safetensors(origin), vocabulary.find(tokenizer or origin, values))


def look(origin: Path, tokenizer: Path | None = None, context: int | None = None) -> Found:
    """What is at ``origin``, a Hugging Face directory or a GGUF file. UserError for what is not here, by name.

    ``context``: fewer positions than the model has, for a shorter context in this run.
    """
    published = open_published(origin, tokenizer)
    family, model, vocab_size = families.read(Keys(str(origin / CONFIG), published.config))
    if context is not None:
        if isinstance(model.positions, Learned) or not 1 <= context <= model.context:
            raise UserError(
                f"--context: {context} must be from 1 to the model's {model.context}, and its positions not be learned"
            )
        model = dataclasses.replace(model, context=context)
    experiment = Experiment(model=model, tokenizer=published.tokenizer.settings(vocab_size))
    config.check(experiment)
    return Found(family, experiment, published)


def read_params(found: Found) -> Any:
    """The weights, as a tree of NumPy arrays."""
    with jax.set_mesh(make_mesh(Mesh())):
        declared = declarations(found.experiment)
    return weights.read(found.family, found.published.source, declared, found.experiment.model.depth)


def import_run(
    origin: Path,
    workdir: Path,
    tokenizer: Path | None,
    context: int | None,
    argv: list[str],
    say: Callable[[str], None],
) -> Found:
    """Make a run of what is at ``origin``. UserError before anything is written; nothing half-written stays."""
    found = look(origin, tokenizer, context)
    with whole("--workdir", workdir) as fresh:
        say(f"{origin}: {found.family.name}, {len(found.published.source.shapes)} tensors")
        fingerprint = found.published.tokenizer.tokenizer(found.experiment.vocab_size).fingerprint
        params = read_params(found)
        found.published.tokenizer.write(fresh)
        with jax.set_mesh(make_mesh(Mesh())):
            checkpoints = Checkpoints(fresh / files.CHECKPOINTS, keep=1)
            checkpoints.save_params(params)
            checkpoints.close()
        record = {"from": str(origin), "family": found.family.name, "config": found.published.config}
        origin_of = provenance(argv, imported=record, tokenizer_hash=fingerprint, end=now())
        write_json(fresh / files.PROVENANCE, origin_of)
        write_json(fresh / files.CONFIG, to_dict(found.experiment))
    return found
