"""The tokenizer that comes with published weights: its file as it is, and which ids start and end a text."""

import dataclasses
from pathlib import Path
from typing import Any, Literal

from transformer.data.imported import FILES, JSON_FILE, ImportedTokenizer
from transformer.data.tokenizer import MODEL_FILE, Imported
from transformer.errors import UserError
from transformer.jsons import read_object

GENERATION = "generation_config.json"
BESIDE = ("tokenizer_config.json", "special_tokens_map.json", GENERATION)


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """``data`` is the content of the file of its format, empty for ids; ``beside`` are small files that belong to it,
    kept for the export."""

    format: Literal["json", "sentencepiece", "ids"]
    data: bytes
    start_id: int | None
    end_ids: tuple[int, ...]
    beside: dict[str, bytes] = dataclasses.field(default_factory=dict)

    def settings(self, vocab_size: int) -> Imported:
        return Imported(format=self.format, vocab_size=vocab_size, start_id=self.start_id, end_ids=self.end_ids)

    def tokenizer(self, vocab_size: int) -> ImportedTokenizer:
        return ImportedTokenizer(self.settings(vocab_size), self.data)

    def write(self, directory: Path) -> None:
        for name, data in {FILES[self.format]: self.data, **self.beside}.items():
            if data:
                (directory / name).write_bytes(data)


def find(where: Path, config: dict[str, Any]) -> Vocabulary:
    """That of a directory, or of a tokenizer.json or SentencePiece file; of none: ids, which text then is."""
    directory = where if where.is_dir() else where.parent
    if where.is_file():
        file = where
    elif not where.is_dir():
        raise UserError(f"--tokenizer: there is no file or directory {where}")
    else:
        file = next((where / name for name in (JSON_FILE, MODEL_FILE) if (where / name).is_file()), Path())
    beside = {name: (directory / name).read_bytes() for name in BESIDE if (directory / name).is_file()}
    generation = read_object(directory / GENERATION) if GENERATION in beside else {}
    starts, ends = marks(config, generation)
    if file == Path():
        return Vocabulary("ids", b"", starts, ends, beside)
    return Vocabulary("json" if file.suffix == ".json" else "sentencepiece", file.read_bytes(), starts, ends, beside)


def marks(config: dict[str, Any], generation: dict[str, Any]) -> tuple[int | None, tuple[int, ...]]:
    """The id before a text and those that end one. Without one of its own the first that ends texts starts them."""

    def ids(value: Any) -> list[int]:
        values = value if isinstance(value, list) else [value]
        return [x for x in values if isinstance(x, int) and not isinstance(x, bool) and x >= 0]

    ends = list(dict.fromkeys(ids(config.get("eos_token_id")) + ids(generation.get("eos_token_id"))))
    starts = ids(config.get("bos_token_id")) + ids(generation.get("bos_token_id")) + ends
    return (starts[0] if starts else None), tuple(ends)
