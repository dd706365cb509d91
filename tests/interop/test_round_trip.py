"""Whole runs: in, used as any other run, and out again, to the bit; through the command line."""

import dataclasses
import json
from pathlib import Path

import jax
import numpy as np
import pytest

from tests import small
from tests.interop.make_golden import GOLDEN
from tests.interop.test_hostile import run
from transformer.config import Experiment
from transformer.data.tokenizer import Bytes
from transformer.errors import UserError
from transformer.files import CHECKPOINTS
from transformer.interop.exporting import export, home
from transformer.interop.importing import look, read_params
from transformer.interop.keys import Keys
from transformer.jsons import write_json
from transformer.model.attention import Attention
from transformer.model.config import Model
from transformer.model.mlp import Gelu, Swiglu
from transformer.model.norms import RmsNorm
from transformer.model.positions import Alibi, Linear, Rotary
from transformer.model.spans import Sliding
from transformer.parallel.mesh import Mesh, make_mesh
from transformer.run import open_run
from transformer.settings import to_dict
from transformer.training.checkpoint import Checkpoints

FINE_TUNE = """
import dataclasses
from pathlib import Path
from transformer.data.prepare import Data
from transformer.run import read_config
from transformer.training.config import Train

def get_config():
    given = read_config(Path("made"))
    return dataclasses.replace(
        given,
        tokenizer=dataclasses.replace(given.tokenizer, path="made"),
        data=Data(source="text.txt", piece_bytes=256),
        train=Train(init_from="made", steps=2, batch=2, learning_rate=1e-3, warmup=1, prompts=(), eval_windows=2),
    )
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A directory with the imported run ``made``, and the working directory of what is done with it."""
    folder = tmp_path_factory.mktemp("weights")
    status, out, err = run("import", f"--from={GOLDEN / 'qwen3'}", f"--workdir={folder / 'made'}", "--json")
    assert status == 0, err
    assert json.loads(out)["tokenizer"] == "ids"
    assert not list(folder.glob("*.unfinished"))
    return folder


def test_an_imported_run_is_sampled_measured_and_trained_from(made, monkeypatch):
    monkeypatch.chdir(made)
    Path("text.txt").write_text(" ".join(str(i * i % 23) for i in range(600)))
    Path("tune.py").write_text(FINE_TUNE)
    status, out, err = run("sample", "--run=made", "--prompt=3 1 4", "--tokens=5", "--temperature=0", "--json")
    assert status == 0, err
    [found] = json.loads(out)["samples"]
    assert 0 < found["tokens"] <= 5 and len(found["text"].split()) == found["tokens"]
    status, out, err = run("evaluate", "--run=made", "--text=text.txt", "--json")
    result = json.loads(out)
    assert status == 0 and result["tokens"] == 600 and result["bytes"] == Path("text.txt").stat().st_size
    for command in ("evaluate", "ablate"):
        status, out, err = run(command, "--run=made")
        assert status == 2 and "--text: made is imported" in err
    status, out, err = run("inspect", "--run=made", "--prompt=3 1 4", "--json")
    assert status == 0, err
    [seen] = json.loads(out)["models"]
    assert [token["id"] for token in seen["tokens"]] == [*open_run(Path("made")).tokenizer.starts, 3, 1, 4]
    status, out, err = run("train", "--config=tune.py", "--workdir=tuned", "--cache=cache", "--json")
    assert status == 0, err
    before, after = (open_run(Path(name)) for name in ("made", "tuned"))
    assert after.experiment.model == before.experiment.model
    with jax.set_mesh(make_mesh(Mesh())):
        old, new = before.params()[0], after.params()[0]
    assert 0 < small.farthest(new, old) < 0.1  # two steps away


def test_imported_weights_are_no_training_to_go_on_with(made, monkeypatch):
    monkeypatch.chdir(made)
    with jax.set_mesh(make_mesh(Mesh())):
        checkpoints = Checkpoints(Path("made") / CHECKPOINTS, keep=1)
        with pytest.raises(UserError, match="no training to go on with; start another run from them with"):
            checkpoints.restore(open_run(Path("made")).experiment, print)
        checkpoints.close()


def test_out_and_in_again_gives_the_same_bits_in_one_file_or_in_several(made, monkeypatch):
    monkeypatch.chdir(made)
    opened = open_run(Path("made"))
    written = export(opened, Path("out"), "newest")
    assert written["family"] == "qwen3"
    export(opened, Path("shards"), "newest", shard_bytes=4000)
    assert len(list(Path("shards").glob("model-*.safetensors"))) > 2
    wanted = read_params(look(GOLDEN / "qwen3"))
    for name in ("out", "shards"):
        found = look(Path(name))
        assert found.experiment == opened.experiment
        small.assert_same(read_params(found), wanted)
    card = Path("out/README.md").read_text()
    assert "imported from" in card and str(opened.experiment.name) in card
    with pytest.raises(UserError, match="--to: out is not empty"):
        export(opened, Path("out"), "newest")


HOMES = {
    "gpt2": Model(),
    "gpt_neox": Model(positions=Rotary(share=0.25), parallel=True, bias=True),
    "llama": Model(positions=Rotary(base=5e5), norm=RmsNorm(), mlp=Swiglu()),
    "mistral": Model(positions=Rotary(), norm=RmsNorm(), mlp=Swiglu(), attention=Attention(span=Sliding(window=9))),
    "gemma": Model(
        positions=Rotary(), norm=RmsNorm(centered=True), mlp=Swiglu(), scale_embedding=True, tie_embeddings=True
    ),
}
HOMELESS = {
    "model.attention.gate=True": Model(attention=Attention(gate=True)),
    "model.positions.kind='alibi'": Model(positions=Alibi()),
    "model.loops=2": Model(loops=2),
    "model.final_norm=False": Model(final_norm=False),
    "model.norms='peri'": Model(norms="peri"),
    "model.logits_soft_cap=3.0": Model(logits_soft_cap=3.0),
    "model.scale_embedding=True": Model(scale_embedding=True, mlp=Gelu(exact=True)),
}


@pytest.mark.parametrize("name", HOMES)
def test_a_model_goes_to_the_family_that_has_all_of_it(name):
    assert home(HOMES[name])[0].name == name


@pytest.mark.parametrize("option", HOMELESS)
def test_an_option_without_a_home_is_named(option):
    with pytest.raises(UserError, match="has no home in a checkpoint of") as refused:
        home(HOMELESS[option])
    assert option.replace("model.", "model.") in str(refused.value)
    assert "stack" not in str(refused.value)


@pytest.mark.parametrize("style", [("rope_theta", "rope_scaling"), ("rope_parameters",)], ids=["older", "newer"])
def test_rotary_settings_go_out_in_both_styles_and_either_is_enough(style):
    """I02: base 500000, angles divided by 2: neither is lost, so logits far from the start stay as they are."""
    model = dataclasses.replace(HOMES["llama"], positions=Rotary(base=5e5, scaling=Linear(factor=2.0)))
    family, values, _ = home(model)
    assert values["rope_theta"] == values["rope_parameters"]["rope_theta"] == 5e5
    assert values["rope_scaling"] == {"rope_type": "linear", "factor": 2.0}
    assert values["rope_parameters"] == {"rope_theta": 5e5, **values["rope_scaling"]}
    other = {"rope_theta", "rope_scaling", "rope_parameters"}.difference(style)
    found = family.read(Keys("config.json", {k: v for k, v in values.items() if k not in other}))
    assert found.positions == model.positions


def test_a_model_without_biases_goes_out_as_one_whose_biases_are_zero(tmp_path):
    """GPT-2 has biases everywhere, our default nowhere."""
    experiment = Experiment(model=small.experiment().model, tokenizer=Bytes())
    params = small.weights(experiment)
    with jax.set_mesh(make_mesh(Mesh())):
        checkpoints = Checkpoints(tmp_path / "run" / CHECKPOINTS, keep=1)
        checkpoints.save_params(params)
        checkpoints.close()
    write_json(tmp_path / "run" / "config.json", to_dict(experiment))
    export(open_run(tmp_path / "run"), tmp_path / "out", "newest")
    found = look(tmp_path / "out")
    assert found.family.name == "gpt2" and found.experiment.model.bias
    again = read_params(found)
    small.assert_same(again["blocks"]["attention"]["query"]["w"], params["blocks"]["attention"]["query"]["w"])
    assert not np.any(again["blocks"]["mlp"]["up"]["b"]) and not np.any(again["final_norm"]["b"])
    rows = small.batch(experiment)
    with_zeros = dataclasses.replace(experiment, model=found.experiment.model)
    found_logits, wanted = (small.compiled_logits(e, p, rows) for e, p in ((with_zeros, again), (experiment, params)))
    assert small.far(found_logits, wanted) < 1e-6
    text = "x</s>y é\x00"
    tokenizer = found.published.tokenizer.tokenizer(257)
    assert tokenizer.encode(text).tolist() == list(text.encode()) and tokenizer.end_id == 256
