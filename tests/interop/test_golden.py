"""Imported models against the field's own implementation: every logit of 64 positions (see make_golden.py)."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest

from tests import small
from tests.interop.make_golden import GOLDEN, MODELS
from transformer.interop.families import FAMILIES
from transformer.interop.importing import Found, look, read_params
from transformer.model.masks import causal
from transformer.model.transformer import Transformer

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
