"""Imported models against the field's own implementation: every logit of 64 positions (see make_golden.py)."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import small
from tests.interop.make_golden import GOLDEN, MODELS
from transformer.interop import weights
from transformer.interop.exporting import home
from transformer.interop.families import FAMILIES, read
from transformer.interop.importing import Found, look, read_params
from transformer.interop.keys import WITHOUT_EFFECT, Keys
from transformer.interop.source import Safetensors
from transformer.model.masks import causal
from transformer.model.positions import None_, Rotary
from transformer.model.transformer import Transformer
from transformer.training.state import declarations

NAMES = sorted(path.name for path in GOLDEN.iterdir())


@functools.cache
def imported(name: str) -> tuple[Found, dict]:
    found = look(GOLDEN / name)
    return found, read_params(found)


def logits(found: Found, params: dict, ids: np.ndarray) -> np.ndarray:
    model = Transformer(found.experiment.model, found.experiment.vocab_size)
    tokens_BT, index_BT = jnp.asarray(ids)[None], jnp.arange(len(ids))[None]
    run = small.jit(lambda params: model.apply({"params": params}, tokens_BT, index_BT, causal(len(ids)))[0][0])
    return np.asarray(run(params))


def test_every_family_has_a_golden_file():
    assert set(NAMES) == set(MODELS)
    assert {look(GOLDEN / name).family.name for name in NAMES} == set(FAMILIES)


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_the_fields_own_implementation(name):
    found, params = imported(name)
    with np.load(GOLDEN / name / "logits.npz") as golden:
        assert golden["logits"].shape == (64, found.experiment.vocab_size)
        assert small.far(logits(found, params, golden["ids"]), golden["logits"]) < 1e-5


def flat(params) -> dict[str, np.ndarray]:
    leaves = jax.tree_util.tree_flatten_with_path(params)[0]
    return {"/".join(str(key.key) for key in path): leaf for path, leaf in leaves}


def test_what_a_config_leaves_out_is_what_the_family_has():
    """SmolLM 3: every fourth block has no positions, the base is two million, and the unembedding is tied."""
    values = json.loads((GOLDEN / "smollm3" / "config.json").read_text())
    for key in ("no_rope_layers", "no_rope_layer_interval", "layer_types", "rope_parameters", "tie_word_embeddings"):
        del values[key]
    wanted = look(GOLDEN / "smollm3").experiment.model
    assert [wanted.block(i).positions for i in range(5)] == [Rotary(base=100.0)] * 3 + [None_(), Rotary(base=100.0)]
    found = read(Keys("config.json", values))[1]
    assert found == dataclasses.replace(wanted, positions=Rotary(base=2e6))


@pytest.mark.parametrize("name", NAMES)
def test_what_was_imported_goes_out_as_it_came(name):
    """Every tensor to the bit, and every key of the settings that says something."""
    found, params = imported(name)
    family, values, said = home(found.experiment.model, found.family.name)
    assert family is found.family
    declared = declarations(dataclasses.replace(found.experiment, model=said))
    written = dict(weights.write(family, flat(params), declared, said.depth))
    source = Safetensors(GOLDEN / name)
    assert written.keys() == source.shapes.keys()
    for tensor in source.shapes:
        small.assert_same(written[tensor], source.read(tensor))
    original = json.loads((GOLDEN / name / "config.json").read_text())
    ours = WITHOUT_EFFECT | {"vocab_size", "original_max_position_embeddings", "_sliding_window_pattern"}
    meant = {k: v for k, v in original.items() if k not in ours and v is not None and v is not False}
    assert {k: values.get(k) for k in meant} == meant
    both = values.get("rope_parameters", {})
    both = both.get("full_attention", both)
    for key, new in (
        ("rope_theta", "rope_theta"),
        ("rotary_emb_base", "rope_theta"),
        ("rotary_pct", "partial_rotary_factor"),
    ):
        assert values.get(key, both.get(new)) == both.get(new)  # the two styles of keys say the same
