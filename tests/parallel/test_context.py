"""Rows cut over devices along their positions: which device holds what, equal work, and attention across the cuts."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import small
from transformer.analysis.evaluate import evaluate
from transformer.config import check
from transformer.data.documents import Encoded
from transformer.errors import UserError
from transformer.generation.decode import Generator, continue_prompts
from transformer.generation.sampling import Sampling
from transformer.model import blockwise
from transformer.model.kernels import attend, plain
from transformer.model.masks import causal
from transformer.parallel.context import arrange, order
from transformer.parallel.mesh import Mesh
from transformer.parallel.rules import put

T = 128


@pytest.mark.parametrize("devices", [1, 2, 4, 8])
def test_every_device_has_the_same_work(devices: int) -> None:
    """Each position once, and as many pairs of a query and a key it sees on every device: T (T + 1) / 2 in all."""
    with small.on(Mesh(context=devices)):
        places = order(T)
        np.testing.assert_array_equal(arrange(np.arange(T)[None])[0], places)
    assert sorted(places) == list(range(T))
    pairs = (places.reshape(devices, -1) + 1).sum(1)
    assert set(pairs) == {T * (T + 1) // 2 // devices}


@pytest.mark.parametrize("kernel", ["plain", "blockwise"])
@pytest.mark.parametrize("mesh", [Mesh(context=4), Mesh(data=2, context=2, tensor=2)], ids=["context", "mixed"])
def test_attention_across_devices(kernel: Any, mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results and gradients as on one device, packed and padded; the long form, its blocks half a chunk long."""
    monkeypatch.setattr(blockwise, "WRITTEN_OUT", 0)
    monkeypatch.setattr(blockwise, "BLOCK", 8)
    random = np.random.default_rng(0)
    q, back = (random.normal(size=(2, T, 2, 2, 4)).astype(np.float32) for _ in range(2))
    k, v = (random.normal(size=(2, T, 2, 4)).astype(np.float32) for _ in range(2))
    ids = np.repeat([[1, 2, 3, 0], [1, 1, 1, 2]], T // 4, axis=1).astype(np.int32)

    def all_four(run: Any) -> Any:
        def found(q: Any, k: Any, v: Any, back: Any, ids: Any) -> Any:
            names = ("batch", "time", "kv_heads")
            q, k, v, back = (put(arrange(x), *names, *[None] * (x.ndim - 3)) for x in (q, k, v, back))
            mask = causal(T, put(arrange(ids), "batch", "time"))
            mixed, pull = jax.vjp(lambda q, k, v: run(q, k, v, mask), q, k, v)
            return mixed, *pull(back)

        return [np.asarray(x) for x in small.jit(found)(*map(jnp.asarray, (q, k, v, back, ids)))]

    one = all_four(plain)
    with small.on(mesh):
        places = order(T)
        many = all_four(lambda *given: attend(kernel, *given))
    for a, b in zip(many, one, strict=True):
        np.testing.assert_allclose(a, b[:, places], atol=3e-6, rtol=0)


def test_a_block_keeps_no_keys_of_other_devices() -> None:
    """What a device keeps of a block for the backward pass falls with the number of devices, as its part of a row."""

    def kept(mesh: Mesh, depth: int) -> int:
        with small.on(mesh):
            shape = jax.eval_shape(lambda: put(jnp.zeros((1, 2048, 2, 1, 16)), "batch", "time", "kv_heads", None, None))

            def loss(x: Any) -> Any:
                def block(x: Any, _: Any) -> Any:
                    return x + attend("blockwise", x, x[:, :, :, 0], x[:, :, :, 0], causal(2048)), None

                return jax.lax.scan(block, x, None, length=depth)[0].sum()

            compiled = small.jit(jax.grad(loss)).lower(shape).compile()
            return int(compiled.memory_analysis().temp_size_in_bytes)

    one, many = (kept(mesh, 32) - kept(mesh, 16) for mesh in (Mesh(), Mesh(context=8)))
    assert many < one / 7


def test_rows_that_cannot_be_cut_are_refused() -> None:
    e = small.experiment(context=24, mesh=Mesh(context=8))
    with pytest.raises(UserError, match=r"config.model.context: 24 .* 2 x mesh.context=8; the next that does is 32"):
        check(e)
    check(small.experiment(context=32, mesh=Mesh(context=8)))


def test_evaluation_is_the_same() -> None:
    e = small.experiment()
    documents, found = Encoded([np.arange(20, dtype=np.int32) % e.vocab_size]), []
    for mesh in (Mesh(), Mesh(context=4), Mesh(data=2, context=2, tensor=2)):
        with small.on(mesh):
            params = small.place(e, small.state(e)).params
            (score,) = evaluate(e, params, documents, np.ones(e.vocab_size, np.int64), stride=4, rows=2)
        found.append(score)
    assert found[1].tokens == found[0].tokens == 19
    for score in found[1:]:
        assert score.nats == pytest.approx(found[0].nats, rel=1e-6)


def test_text_is_not_generated_across_devices_of_a_row() -> None:
    e = small.experiment(mesh=Mesh(context=2))
    generator = Generator(e, Sampling(), (0,))
    with small.on(e.mesh), pytest.raises(UserError, match=r"config.mesh.context"):
        next(continue_prompts(generator, small.weights(e), [[0]], 2))
