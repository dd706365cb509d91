"""Hand a run's weights out as a Hugging Face directory, in the family that has a home for all of its options."""

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from transformer.errors import UserError
from transformer.files import read_provenance
from transformer.interop import families, source, vocabulary, weights
from transformer.interop.card import card
from transformer.interop.common import Family
from transformer.interop.directory import whole
from transformer.interop.handing import write_tokenizer
from transformer.interop.keys import WITHOUT_EFFECT, Keys
from transformer.jsons import write_json
from transformer.model.config import Model
from transformer.model.grouped import Grouped, MultiHead, MultiQuery
from transformer.parallel.mesh import make_mesh
from transformer.run import Run
from transformer.settings import differing, leaves
from transformer.training.state import declarations

SHARD_BYTES = 5 << 30
# What the result of the model does not depend on when it is not trained.
FREE = ("dropout", "layer_drop", "init_std", "dtype", "stack", "remat", "attention.kernel")


def canonical(model: Model) -> Model:
    """The same model, where it can be written in several ways in the one that an import writes."""
    projection, heads = model.attention.projection, model.heads
    if type(projection) in (MultiHead, MultiQuery, Grouped):
        kv = projection.kv_count(heads)
        projection = MultiHead() if kv == heads else MultiQuery() if kv == 1 else Grouped(kv_heads=kv)
    return dataclasses.replace(
        model,
        head_width=None if model.head_size * heads == model.width else model.head_size,
        mlp=dataclasses.replace(model.mlp, width=model.mlp.hidden(model.width)),
        attention=dataclasses.replace(model.attention, projection=projection),
    )


def without_home(family: Family, model: Model) -> tuple[dict[str, Any], Model, list[str]]:
    """The config.json of the model in a family, the model that this says, and which settings it does not say."""
    values = family.write(model)
    try:
        said = family.read(Keys(family.name, {"model_type": family.name, **values}))
    except UserError as error:
        return values, model, [str(error)]
    differ = differing(leaves(model), leaves(said))
    if said.bias and not model.bias:
        differ.pop("bias", None)  # biases of zeros are none
    return values, said, [f"model.{name}={pair[0]!r}" for name, pair in differ.items() if name not in FREE]


def home(model: Model, first: str | None = None) -> tuple[Family, dict[str, Any], Model]:
    """The family that the model can be written in, ``first`` if that is one. UserError with what stands against the
    nearest one."""
    tried = []
    for family in sorted(families.FAMILIES.values(), key=lambda f: f.name != first):
        values, said, homeless = without_home(family, canonical(model))
        if not homeless:
            return family, values, said
        tried.append((len(homeless), family.name, homeless))
    _, name, homeless = min(tried, key=lambda x: x[0])
    raise UserError(f"--run: {', '.join(homeless)} has no home in a checkpoint of {name}, the nearest family")


def export(run: Run, to: Path, which: str, shard_bytes: int = SHARD_BYTES) -> dict[str, Any]:
    """Write the directory; what was written. UserError where the model has no home there."""
    experiment, known = run.experiment, read_provenance(run.directory)
    imported = known.get("imported") or {}
    family, values, said = home(experiment.model, imported.get("family"))
    kept = {k: v for k, v in (imported.get("config") or {}).items() if k in WITHOUT_EFFECT}
    starts, ends = run.tokenizer.starts, list(run.tokenizer.end_ids)
    marks = {"bos_token_id": starts[0] if starts else None, "eos_token_id": ends[0] if len(ends) == 1 else ends or None}
    config = {
        **{k: v for k, v in kept.items() if k not in ("dtype", "torch_dtype", "transformers_version")},
        "architectures": [family.architecture],
        "model_type": family.name,
        "vocab_size": experiment.vocab_size,
        **({"pad_token_id": None} | marks | {k: v for k, v in kept.items() if k in marks}),
        **values,
        "torch_dtype": "float32",
    }
    with whole("--to", to) as fresh:
        with jax.set_mesh(make_mesh(experiment.mesh)):
            declared = declarations(dataclasses.replace(experiment, model=said))
            params, step = run.params(which)
        flat = {
            "/".join(str(key.key) for key in path): np.asarray(leaf)
            for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]
        }
        _write_tensors(fresh, weights.write(family, flat, declared, said.depth), shard_bytes)
        write_json(fresh / source.CONFIG, config)
        tokenizer = write_tokenizer(run, fresh)
        if not (fresh / vocabulary.GENERATION).exists():
            write_json(fresh / vocabulary.GENERATION, marks)
        (fresh / "README.md").write_text(card(run, family.name, step, known, tokenizer), encoding="utf-8")
    return {"run": str(run.directory), "step": step, "to": str(to), "family": family.name, "tokenizer": tokenizer}


def _write_tensors(directory: Path, tensors: Iterable[tuple[str, np.ndarray]], shard_bytes: int) -> None:
    """In one file, or in several of at most ``shard_bytes`` with their index; no more than that is held at once."""
    parts: list[list[str]] = []
    held: dict[str, np.ndarray] = {}
    size = written = 0

    def flush() -> None:
        source.write(directory / f"part-{len(parts)}", held)
        parts.append(list(held))
        held.clear()

    for name, tensor in tensors:
        if held and size + tensor.nbytes > shard_bytes:
            flush()
            size = 0
        held[name] = tensor
        size, written = size + tensor.nbytes, written + tensor.nbytes
    flush()
    if len(parts) == 1:
        (directory / "part-0").rename(directory / source.ONE)
        return
    files: dict[str, str] = {}
    for i, names in enumerate(parts):
        file = f"model-{i + 1:05d}-of-{len(parts):05d}.safetensors"
        (directory / f"part-{i}").rename(directory / file)
        files |= dict.fromkeys(names, file)
    write_json(directory / source.INDEX, {"metadata": {"total_size": written}, "weight_map": files})
