"""A run's tokenizer as a Hugging Face directory has it."""

import json
from pathlib import Path
from typing import Any

from transformer.data.imported import JSON_FILE, ImportedTokenizer, byte_letters
from transformer.data.tokenizer import MODEL_FILE, ByteTokenizer
from transformer.interop.vocabulary import BESIDE
from transformer.jsons import write_json
from transformer.run import Run

END = "<|endoftext|>"


def write_tokenizer(run: Run, directory: Path) -> str:
    """Write it; which files it is in, for the model card."""
    tokenizer = run.tokenizer
    if isinstance(tokenizer, ImportedTokenizer):
        tokenizer.save(directory)
        for name in BESIDE:
            if (run.directory / name).is_file():
                (directory / name).write_bytes((run.directory / name).read_bytes())
        return "none: text is ids" if not tokenizer.data else "as it was imported"
    if isinstance(tokenizer, ByteTokenizer):
        (directory / JSON_FILE).write_text(json.dumps(of_bytes(tokenizer.end_id)), encoding="utf-8")
        write_json(directory / BESIDE[0], {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END})
        return f"{JSON_FILE}: the bytes of UTF-8, and {tokenizer.end_id} for the end of a text"
    tokenizer.save(directory)
    return f"{MODEL_FILE}: SentencePiece, for the library sentencepiece; {tokenizer.end_id} is the end of a text"


def of_bytes(end_id: int) -> dict[str, Any]:
    """A tokenizer.json in which every byte is an id: byte-level BPE without merges."""
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {
        "version": "1.0",
        "added_tokens": [{"id": end_id, "content": END, **special}],
        "pre_tokenizer": level,
        "decoder": level,
        "model": {"type": "BPE", "vocab": {letter: b for b, letter in byte_letters().items()}, "merges": []},
    }
