"""Published tensors on disk, read one at a time: safetensors, in one file or several."""

from pathlib import Path
from typing import Any, Protocol

import numpy as np

from transformer.errors import UserError
from transformer.jsons import read_object

CONFIG, ONE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
NUMBERS = ("F64", "F32", "F16", "BF16")


class Source(Protocol):
    """Shapes of all tensors, known without reading them, and each one as float32 when asked for."""

    where: str
    shapes: dict[str, tuple[int, ...]]

    def read(self, name: str) -> np.ndarray: ...


class Safetensors:
    """The tensors of a Hugging Face directory. UserError where files are missing, damaged or not what they seem."""

    def __init__(self, directory: Path):
        self.where = str(directory)
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._files: dict[str, Any] = {}  # by the name of a tensor
        if (directory / INDEX).is_file():
            listed = self._listed(directory / INDEX)
            files = sorted(set(listed.values()))
        elif (directory / ONE).is_file():
            listed, files = None, [ONE]
        else:
            raise UserError(f"{directory}: {_without(directory)}")
        for file in files:
            for name in self._open(directory / file):
                if name in self.shapes or (listed is not None and listed.get(name) != file):
                    raise UserError(f"{directory / file}: {name} is not listed as one of its tensors in {INDEX}")
                self._add(directory / file, name)
        missing = sorted(set(listed or ()) - self.shapes.keys())
        if missing:
            raise UserError(f"{directory}: {INDEX} lists {missing[0]}, which is not in {(listed or {})[missing[0]]}")

    @staticmethod
    def _listed(index: Path) -> dict[str, str]:
        listed = read_object(index).get("weight_map")
        if not isinstance(listed, dict) or not all(isinstance(x, str) for x in listed.values()) or not listed:
            raise UserError(f"{index}: has no weight_map from names of tensors to files")
        for file in listed.values():
            if Path(file).name != file or "\\" in file or not file.endswith(".safetensors"):
                raise UserError(f"{index}: {file!r} is not the name of a safetensors file beside it")
            if not (index.parent / file).is_file():
                raise UserError(f"{index}: lists {file}, which is missing")
        return listed

    def _open(self, path: Path) -> list[str]:
        import safetensors

        try:
            self._file = safetensors.safe_open(path, "numpy")
            return list(self._file.keys())
        except (OSError, safetensors.SafetensorError) as error:
            raise UserError(f"{path}: cannot be read as safetensors: {error}") from error

    def _add(self, path: Path, name: str) -> None:
        part = self._file.get_slice(name)
        if part.get_dtype() not in NUMBERS:
            raise UserError(f"{path}: {name} is {part.get_dtype()}; there are {', '.join(NUMBERS)}")
        self.shapes[name], self._files[name] = tuple(part.get_shape()), self._file

    def read(self, name: str) -> np.ndarray:
        found: np.ndarray = self._files[name].get_tensor(name).astype(np.float32)
        return found


def _without(directory: Path) -> str:
    """Why a directory holds no weights that are read here."""
    pickled = sorted(p.name for pattern in ("*.bin", "*.pt", "*.pth", "*.ckpt") for p in directory.glob(pattern))
    if pickled:
        return (
            f"{pickled[0]} is a pickle, which can run any program when it is read, so it is not; save the model as "
            "safetensors on a machine where that does not matter: model.save_pretrained(DIR, safe_serialization=True)"
        )
    return f"has neither {ONE} nor {INDEX}"


def config_of(directory: Path) -> dict[str, Any]:
    file = directory / CONFIG
    if not file.is_file():
        raise UserError(f"{directory}: has no {CONFIG}, so it is no Hugging Face directory")
    return read_object(file)


def write(path: Path, tensors: dict[str, np.ndarray]) -> None:
    """One safetensors file."""
    from safetensors.numpy import save_file

    save_file(tensors, path, metadata={"format": "pt"})
