"""The page on adding a kind of attention, followed: its file is taken from the page, and everything must take it."""

import functools
import operator
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import small
from transformer import config
from transformer.analysis.cost import cache, count_parameters, forward_flops
from transformer.analysis.watch import look
from transformer.errors import UserError
from transformer.generation.decode import Generator, continue_prompts
from transformer.generation.sampling import Sampling
from transformer.model.attention import KINDS, Attention
from transformer.model.transformer import empty_cache
from transformer.parallel.mesh import Mesh
from transformer.settings import override
from transformer.training.state import init_params
from transformer.training.step import train_step

PAGE = Path(__file__).parents[1] / "docs" / "adding_attention.md"


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """The page's file, loaded as the command line loads it; afterwards the table is as it was."""
    path = tmp_path_factory.mktemp("experiments") / "mean.py"
    (code,) = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.M | re.S)
    path.write_text(code, encoding="utf-8")
    before = dict(KINDS)
    yield str(path)
    for added in KINDS.keys() - before.keys():
        del KINDS[added]
    Attention.__annotations__["projection"] = functools.reduce(operator.or_, KINDS)


def few(path, **changes):
    """The experiment with a small model."""
    sizes = {"model.width": 16, "model.context": 8, "train.batch": 8, "model.mlp.width": 16}
    return config.load(path, {name: str(value) for name, value in (sizes | changes).items()})


def test_the_kind_is_a_tag_and_has_a_bill(file):
    e = few(file)
    assert override(e, {"model.attention.projection": "multi_head"}) != e
    assert override(e, {"model.attention.projection": "mean"}) == e
    built = jax.eval_shape(lambda: init_params(e))
    assert count_parameters(e)["total"] == sum(x.size for x in jax.tree.leaves(built))
    assert forward_flops(e)["attention_tables"] == 2 * 2 * 8 * 16
    held = jax.eval_shape(lambda: empty_cache(e.model, 1, 8))
    assert cache(e)["bytes_per_context"] == sum(x.size * 4 for x in jax.tree.leaves(held))
    with pytest.raises(UserError, match="mean has equal weights alone"):
        few(file, **{"model.positions": "rotary"})
    with pytest.raises(UserError, match="mean has equal weights alone"):
        few(file, **{"model.attention.gate": True})


def test_it_trains_and_isolates_documents_and_sees_nothing_ahead(file):
    """A step makes the loss of its batch smaller, on one device and on a mesh of eight alike."""
    e = few(file, **{"train.learning_rate": 0.1, "train.warmup": 0})
    rows = small.batch(e)
    run = small.jit(train_step, static_argnums=0)
    state, metrics = run(e, small.state(e), rows)
    assert float(run(e, state, rows)[1].loss) < float(metrics.loss)
    cut = override(e, {"mesh.data": 2, "mesh.fsdp": 2, "mesh.context": 2})
    with small.on(cut.mesh):
        _, many = run(cut, small.place(cut, small.state(cut)), small.place_batch(rows))
    np.testing.assert_allclose(many.loss, metrics.loss, rtol=1e-5)

    params = small.weights(e)
    found = small.compiled_logits(e, params, rows)
    first = np.arange(8)[None] < (rows.segments_BT == 2).argmax(1)[:, None]
    changed = rows._replace(tokens_BT=np.where(first, (rows.tokens_BT + 1) % 257, rows.tokens_BT))
    second = rows.segments_BT == 2
    np.testing.assert_array_equal(small.compiled_logits(e, params, changed)[second], found[second])
    later = rows._replace(tokens_BT=np.where(np.arange(8)[None] > 3, (rows.tokens_BT + 1) % 257, rows.tokens_BT))
    np.testing.assert_array_equal(small.compiled_logits(e, params, later)[:, :4], found[:, :4])


def test_it_generates_from_its_cache_what_it_does_without(file):
    e, prompts = few(file, **{"model.context": 16}), [[256, 1, 2], [256, 7]]
    with small.on(Mesh()):
        params = jax.tree.map(jnp.asarray, small.weights(e))
        with_cache, without = (
            list(continue_prompts(Generator(e, Sampling(temperature=0.0), (256,), cached), params, prompts, 6))[-1]
            for cached in (True, False)
        )
    assert with_cache == without and len(with_cache[0].ids) > 1


def test_weights_that_it_does_not_tell_are_not_made_up(file):
    e = few(file)
    with (
        small.on(Mesh()),
        pytest.raises(UserError, match=r"^config.model.attention.projection: mean has no method mix"),
    ):
        look(e, jax.tree.map(jnp.asarray, small.weights(e)), jnp.zeros((1, 8), jnp.int32))
