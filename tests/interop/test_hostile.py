"""Damaged and hostile files: one line each, nothing executed, nothing half-written."""

import contextlib
import io
import json
import pickle
import re
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.interop.make_golden import GOLDEN
from transformer.__main__ import COMMANDS
from transformer.cli import main

ONE, INDEX = "model.safetensors", "model.safetensors.index.json"
FIRST = "model-00001-of-00004.safetensors"


def run(*argv: str) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main(COMMANDS, list(argv))
    return status, out.getvalue(), err.getvalue()


def copy(name: str, folder: Path) -> Path:
    return Path(shutil.copytree(GOLDEN / name, folder / name))


def tensors(change):
    """A change of the tensors of the one file, as a damage to the directory."""

    def damage(path: Path) -> None:
        found = load_file(path / ONE)
        change(found)
        save_file(found, path / ONE)

    return damage


def settings(**changed):
    def damage(path: Path) -> None:
        file = path / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changed))

    return damage


def listing(change):
    def damage(path: Path) -> None:
        index = json.loads((path / INDEX).read_text())
        change(path, index["weight_map"])
        (path / INDEX).write_text(json.dumps(index))

    return damage


def cut(path: Path) -> None:
    data = (path / ONE).read_bytes()
    (path / ONE).write_bytes(data[:-7])


def huge(path: Path) -> None:
    (path / ONE).write_bytes(struct.pack("<Q", 1 << 44) + b"{}")


def endless(path: Path) -> None:
    header = json.dumps({"a": {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 1 << 42]}}).encode()
    (path / ONE).write_bytes(struct.pack("<Q", len(header)) + header)


class Trap:
    def __reduce__(self):
        return (Path.touch, (Path("executed"),))


def pickled(path: Path) -> None:
    (path / ONE).unlink()
    (path / "pytorch_model.bin").write_bytes(pickle.dumps(Trap()))


def linked(path: Path, listed: dict[str, str]) -> None:
    save_file({"x": np.zeros(2, np.float32)}, path.parent / "outside.safetensors")
    listed["model.norm.weight"] = "../outside.safetensors"


def emptied(path: Path) -> None:
    for file in path.iterdir():
        file.unlink()


HEAD, NORM = "lm_head.weight", "model.norm.weight"
DAMAGES = {
    "cut off": ("qwen3", cut, "cannot be read as safetensors"),
    "a header of terabytes": ("qwen3", huge, "header too large"),
    "a tensor of terabytes": ("qwen3", endless, "cannot be read as safetensors"),
    "no tensors": ("qwen3", lambda p: (p / ONE).write_bytes(b""), "cannot be read as safetensors"),
    "a pickle": ("qwen3", pickled, "pytorch_model.bin is a pickle, which can run any program"),
    "an empty directory": ("qwen3", emptied, "has no config.json"),
    "config.json is no JSON": ("qwen3", lambda p: (p / "config.json").write_text("{"), "is not JSON"),
    "config.json is a list": ("qwen3", lambda p: (p / "config.json").write_text("[]"), "is not a JSON object"),
    "no weights": ("qwen3", lambda p: (p / ONE).unlink(), "has neither model.safetensors nor"),
    "another shape": ("qwen3", tensors(lambda t: t.update({NORM: t[NORM][:-1]})), r"norm.weight has the shape \[15\]"),
    "a transposed matrix": ("qwen3", tensors(lambda t: t.update({HEAD: t[HEAD].T.copy()})), "has the shape"),
    "a missing tensor": ("qwen3", tensors(lambda t: t.pop(NORM)), "model.norm.weight is missing"),
    "a missing head": ("qwen3", tensors(lambda t: t.pop(HEAD)), "lm_head.weight is missing"),
    "an extra tensor": ("qwen3", tensors(lambda t: t.update(x=t[NORM].copy())), "x is not a tensor of this model"),
    "integers": ("qwen3", tensors(lambda t: t.update({NORM: t[NORM].astype(np.int32)})), "is I32; there are"),
    "a head that is not tied": (
        "qwen3-biases",
        tensors(lambda t: t.update({HEAD: t["model.embed_tokens.weight"] + 1})),
        "tied to the embedding and lm_head.weight differs",
    ),
    "a path in the index": ("llama", listing(linked), "'../outside.safetensors' is not the name of a safetensors file"),
    "an absolute path": (
        "llama",
        listing(lambda p, m: m.update({NORM: "/etc/passwd"})),
        "'/etc/passwd' is not the name of a safetensors file",
    ),
    "a pickle in the index": (
        "llama",
        listing(lambda p, m: m.update({NORM: "evil.bin"})),
        "'evil.bin' is not the name of a safetensors file",
    ),
    "a missing shard": ("llama", lambda p: (p / FIRST).unlink(), "which is missing"),
    "a tensor in another shard": ("llama", listing(lambda p, m: m.update({NORM: FIRST})), "is not listed"),
    "a tensor that no shard has": (
        "llama",
        listing(lambda p, m: m.update(ghost=FIRST)),
        "lists ghost, which is",
    ),
    "an unknown family": ("qwen3", settings(model_type="mamba"), "model_type='mamba' is not a family"),
    "an unknown key": ("qwen3", settings(mixture=3), "mixture=3 is not known here"),
    "quantised": ("qwen3", settings(quantization_config={"bits": 4}), "quantization_config="),
    "a key of the wrong type": ("qwen3", settings(hidden_size="16"), "hidden_size must be a whole number"),
    "a width of billions": ("qwen3", settings(hidden_size=10**12), "hidden_size must be from 1 to"),
    "another width": ("qwen3", settings(hidden_size=32), "has the shape"),
    "heads that do not divide": ("qwen3", settings(num_key_value_heads=3), "do not divide"),
    "a missing size": ("qwen3", lambda p: settings(hidden_size=None)(p), "hidden_size must be a whole number"),
    "another activation": ("qwen3", settings(hidden_act="relu"), "hidden_act='relu'"),
    "dynamic scaling": (
        "llama",
        settings(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 100.0}),
        "rotary scaling 'dynamic' is not here",
    ),
    "bases that disagree": ("llama", settings(rope_theta=5.0), "its rope_theta is not the one beside it"),
    "scalings that disagree": (
        "llama-yarn",
        settings(rope_scaling={"type": "linear", "factor": 2.0}),
        "differs from",
    ),
    "both directions": ("gemma2", settings(use_bidirectional_attention=True), "use_bidirectional_attention=True"),
    "windows beside no positions": ("smollm3", settings(use_sliding_window=True), "use_sliding_window=True"),
    "windows by another key": ("smollm3", settings(layer_types=["sliding_attention"] * 5), "layer_types="),
    "positions of fewer blocks": ("smollm3", settings(no_rope_layers=[1, 0]), "wanted 5 of 0"),
    "windows of no kind": ("gemma2", settings(layer_types=["odd", "even"]), "layer_types="),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_or_hostile_directory_is_one_line(damage, tmp_path, monkeypatch):

    monkeypatch.chdir(tmp_path)
    name, act, said = DAMAGES[damage]
    path = copy(name, tmp_path / "given")
    act(path)
    status, out, err = run("import", f"--from={path}", "--workdir=made")
    assert status == 2 and not out
    line = err.splitlines()[-1]
    assert line.startswith("error: ") and re.search(said, line), err
    assert len([x for x in err.splitlines() if x.startswith("error")]) == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["given"]


def test_nothing_is_written_where_something_is(tmp_path):
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "mine").write_text("x")
    status, _, err = run("import", f"--from={GOLDEN / 'qwen3'}", f"--workdir={tmp_path / 'made'}")
    assert status == 2 and "is not empty" in err
    assert [p.name for p in (tmp_path / "made").iterdir()] == ["mine"]


def test_an_origin_that_is_none_is_one_line(tmp_path):
    (tmp_path / "file").write_text("x")
    (tmp_path / "bad.gguf").write_bytes(b"GGUF\x03\x00\x00\x00" + b"\xff" * 16)
    for given, said in (("absent", "there is no directory"), ("file", "is a file"), ("no.gguf", "there is no file")):
        status, _, err = run("import", f"--from={tmp_path / given}", f"--workdir={tmp_path / 'made'}")
        assert status == 2 and said in err
    status, _, err = run("import", f"--from={tmp_path / 'bad.gguf'}", f"--workdir={tmp_path / 'made'}")
    assert status == 2 and "cannot be read as GGUF" in err
    assert not (tmp_path / "made").exists()
