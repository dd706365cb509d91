"""Every attention kernel against the plain one, and the plain one against NumPy: results and gradients."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as fuzz
from hypothesis import strategies as st

from tests import small
from transformer.config import Experiment
from transformer.errors import UserError
from transformer.model import blockwise, fused, kernels
from transformer.model.attention import Attention
from transformer.model.config import Model
from transformer.model.kernels import KERNELS, Call, choose
from transformer.model.masks import Mask, causal
from transformer.model.scores import Scoring
from transformer.parallel.mesh import Mesh as MeshConfig
from transformer.parallel.mesh import make_mesh
from transformer.training.step import sum_gradients


class Given(NamedTuple):
    q: Any
    k: Any
    v: Any
    back: Any
    mask: Mask


def given_arrays(
    seed: int, B: int, T: int, S: int, K: int, G: int, H: int, mask: Mask, dtype: Any, V: int = 0
) -> Given:
    """Values are V wide; 0: as wide as keys."""
    random = np.random.default_rng(seed)
    q, back = (random.normal(size=(B, T, K, G, width)) for width in (H, V or H))
    k, v = (random.normal(size=(B, S, K, width)) for width in (H, V or H))
    return Given(*(jnp.asarray(x, dtype) for x in (q, k, v, back)), mask)


def segments(seed: int, B: int, T: int) -> Any:
    """Packed rows: some segments, then padding, which may take the whole row."""
    random = np.random.default_rng(seed)
    rows = []
    for _ in range(B):
        cuts = np.sort(random.integers(0, T + 1, random.integers(0, 4)))
        ids = np.searchsorted(cuts, np.arange(T), side="right") + 1
        ids[random.integers(0, T + 1) :] = 0
        rows.append(ids)
    return jnp.asarray(np.stack(rows), jnp.int32)


def both(run: Any, x: Given, how: Scoring | None = None) -> list[np.ndarray]:
    """The result and the gradients of q, k, v, and of sinks where there are some."""

    def all_four(x: Given, how: Scoring) -> Any:
        mixed, pull = jax.vjp(lambda q, k, v, how: run(q, k, v, x.mask, how), x.q, x.k, x.v, how)
        *slopes, by_how = pull(x.back)
        return mixed, *slopes, *([] if how.sinks_KG is None else [by_how.sinks_KG])

    return [np.asarray(a, np.float64) for a in small.jit(all_four)(x, how or Scoring())]


def reference(x: Given) -> np.ndarray:
    q, k, v = (np.asarray(a, np.float64) for a in (x.q, x.k, x.v))
    seen = np.asarray(x.mask.visible_BTS())[:, None, None]
    scores = np.where(seen, np.einsum("btkgh,bskh->bkgts", q, k) / q.shape[-1] ** 0.5, -np.inf)
    weights = np.exp(scores - np.where(seen.any(-1, keepdims=True), scores.max(-1, keepdims=True), 0))
    total = weights.sum(-1, keepdims=True)
    return np.einsum("bkgts,bskh->btkgh", weights / np.where(total > 0, total, 1), v)


def assert_same(found: list[np.ndarray], wanted: list[np.ndarray], atol: float) -> None:
    for name, a, b in zip(("result", "dq", "dk", "dv", "dsinks"), found, wanted, strict=False):
        assert np.isfinite(a).all(), name
        np.testing.assert_allclose(a, b, atol=atol * max(1, np.abs(b).max()), rtol=0, err_msg=name)


@fuzz(max_examples=12, deadline=None)
@given(st.data())
def test_blockwise_equals_plain(data: Any) -> None:
    """Short and long form; whole blocks and remainders; packed, padded, grouped, and queries against a longer cache."""
    draw = data.draw
    T, B, K, G, H = (draw(st.integers(*r)) for r in ((1, 150), (1, 3), (1, 2), (1, 3), (1, 8)))
    seed, long = draw(st.integers(0, 1000)), draw(st.booleans())
    S = T
    if draw(st.booleans()):
        mask = causal(T, segments(seed, B, T) if draw(st.booleans()) else None)
    else:  # a row's queries begin anywhere in a cache that is longer
        S = T + draw(st.integers(0, 40))
        first = np.random.default_rng(seed).integers(0, S - T + 1, (B, 1))
        mask = Mask(jnp.asarray(first + np.arange(T), jnp.int32), jnp.arange(S, dtype=jnp.int32)[None])
    span = draw(st.sampled_from([{}, {"window": draw(st.integers(1, 60))}, {"chunk": draw(st.integers(1, 60))}]))
    V = draw(st.sampled_from([0, 3]))
    x = given_arrays(seed, B, T, S, K, G, H, dataclasses.replace(mask, **span), jnp.float32, V)
    random = np.random.default_rng(seed)
    how = Scoring(
        sinks_KG=jnp.asarray(random.normal(size=(K, G)), jnp.float32) if draw(st.booleans()) else None,
        slopes_KG=jnp.asarray(random.uniform(0, 0.3, (K, G)), jnp.float32) if draw(st.booleans()) else None,
        soft_cap=draw(st.sampled_from([None, 1.5])),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blockwise, "WRITTEN_OUT", 0 if long else 1024)
        patch.setattr(blockwise, "BLOCK", draw(st.sampled_from([16, 32])))
        found = both(blockwise.blockwise, x, how)
    assert_same(found, both(kernels.plain, x, how), 3e-6)
    if not how.options:
        np.testing.assert_allclose(found[0], reference(x), atol=1e-5, rtol=0)


@pytest.mark.parametrize("long", [False, True])
def test_blockwise_in_bfloat16_is_as_exact_as_plain(long: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    mask = causal(200, segments(3, 2, 200))
    exact = both(kernels.plain, given_arrays(0, 2, 200, 200, 2, 2, 16, mask, jnp.float32))
    x = given_arrays(0, 2, 200, 200, 2, 2, 16, mask, jnp.bfloat16)
    if long:
        monkeypatch.setattr(blockwise, "WRITTEN_OUT", 0)
        monkeypatch.setattr(blockwise, "BLOCK", 64)
    ours, plain = both(blockwise.blockwise, x), both(kernels.plain, x)
    for a, b, wanted in zip(ours, plain, exact, strict=True):
        assert np.abs(a - wanted).mean() <= 1.2 * np.abs(b - wanted).mean() + 1e-6


def test_blocks_that_the_mask_hides_are_not_visited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Documents of one block each: of 8 x 8 pairs of blocks only the diagonal is worked through."""
    visited: list[int] = []
    visit = blockwise._visit

    def counted(*args: Any) -> Any:
        jax.debug.callback(lambda: visited.append(1))
        return visit(*args)

    monkeypatch.setattr(blockwise, "_visit", counted)
    monkeypatch.setattr(blockwise, "WRITTEN_OUT", 0)
    monkeypatch.setattr(blockwise, "BLOCK", 16)
    ids = jnp.asarray(np.arange(128)[None] // 16 + 1, jnp.int32)
    for mask, pairs in ((causal(128, ids), 8), (causal(128), 36)):
        visited.clear()
        x = given_arrays(0, 1, 128, 128, 1, 1, 4, mask, jnp.float32)
        jax.block_until_ready(jax.jit(blockwise.blockwise)(x.q, x.k, x.v, mask))
        jax.effects_barrier()
        assert len(visited) == pairs


@pytest.mark.parametrize(("packed", "window", "cap"), [(False, None, None), (True, None, None), (True, 20, 1.5)])
def test_splash_equals_plain(packed: bool, window: int | None, cap: float | None) -> None:
    """The TPU's kernel, interpreted: the same results and gradients, zeros where a position is padding."""
    mask = dataclasses.replace(causal(128, segments(5, 2, 128) if packed else None), window=window)
    how = Scoring(soft_cap=cap)
    x = given_arrays(1, 2, 128, 128, 1, 2, 8, mask, jnp.float32, V=8 if window is None else 4)
    assert_same(both(functools.partial(fused.splash, interpret=True), x, how), both(kernels.plain, x, how), 5e-6)


@pytest.mark.parametrize(("name", "long"), [("plain", False), ("blockwise", False), ("blockwise", True)])
def test_a_window_of_4_shows_4_keys(name: str, long: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """M05: 1, 2, 3, 4, 4, 4, 4, 4 keys, the query's own among them; cuDNN refuses windows, splash is held above."""
    monkeypatch.setattr(blockwise, "WRITTEN_OUT", 0 if long else 1024)
    monkeypatch.setattr(blockwise, "BLOCK", 2)
    mask = dataclasses.replace(causal(8), window=4)
    alike = jnp.zeros((1, 8, 1, 1, 8)), jnp.zeros((1, 8, 1, 8))  # every key that is seen has the same weight
    shares_TS = small.jit(KERNELS[name].run)(*alike, jnp.eye(8)[None, :, None], mask, Scoring())[0, :, 0, 0]
    wanted_TS = np.tri(8) - np.tri(8, k=-4)
    assert wanted_TS.sum(1).tolist() == [1, 2, 3, 4, 4, 4, 4, 4]
    np.testing.assert_allclose(shares_TS, wanted_TS / wanted_TS.sum(1, keepdims=True), atol=1e-6)
    gpu = dataclasses.replace(CPU, platform="gpu", packed=False, window=4)
    with pytest.raises(UserError, match="cudnn cannot be used here: it masks whole rows alone"):
        choose("cudnn", gpu)


def memory(context: int, name: str) -> int:
    """Bytes of temporaries of a forward and backward pass, as the compiler plans them."""
    shape = jax.ShapeDtypeStruct((1, context, 2, 1, 16), jnp.float32)
    keys = jax.ShapeDtypeStruct((1, context, 2, 16), jnp.float32)

    def loss(q: Any, k: Any, v: Any) -> Any:
        return KERNELS[name].run(q, k, v, causal(context)).sum()

    compiled = jax.jit(jax.grad(loss, (0, 1, 2))).lower(shape, keys, keys).compile()
    return int(compiled.memory_analysis().temp_size_in_bytes)  # type: ignore[union-attr]


def test_memory_is_linear_in_the_context_where_plain_is_quadratic() -> None:
    small_, large = memory(2048, "blockwise"), memory(8192, "blockwise")
    assert large < 5 * small_
    assert memory(4096, "plain") > 3.5 * memory(2048, "plain")
    assert memory(8192, "blockwise") < memory(8192, "plain") / 20


CPU = Call(platform="cpu", queries=256, keys=256, head_width=64, dtype="bfloat16", ordered=True, packed=True)


@pytest.mark.parametrize(
    ("changes", "chosen"),
    [
        ({}, "blockwise"),
        ({"queries": 1}, "plain"),
        ({"queries": 64, "keys": 64}, "plain"),
        ({"platform": "gpu", "packed": False}, "cudnn"),
        ({"platform": "gpu"}, "blockwise"),
        ({"platform": "gpu", "packed": False, "value_width": 32}, "blockwise"),
        ({"platform": "gpu", "packed": False, "dtype": "float32"}, "blockwise"),
        ({"platform": "gpu", "packed": False, "head_width": 256}, "blockwise"),
        ({"platform": "tpu"}, "splash"),
        ({"platform": "tpu", "queries": 200, "keys": 200}, "blockwise"),
        ({"platform": "tpu", "ordered": False}, "blockwise"),
    ],
)
def test_auto_chooses_by_what_each_kernel_can_do_and_says_why(changes: dict[str, Any], chosen: str) -> None:
    import dataclasses

    name, reason = choose("auto", dataclasses.replace(CPU, **changes))
    assert name == chosen
    for other in KERNELS:
        if list(KERNELS).index(other) < list(KERNELS).index(name) and changes.get("queries") != 1:
            assert f"{other}: " in reason, "what was passed over is named with its reason"


@pytest.mark.parametrize("name", ["cudnn", "splash"])
def test_D01_a_kernel_refuses_what_it_cannot_do(name: str) -> None:
    with pytest.raises(UserError, match=f"config.model.attention.kernel: {name} cannot be used here: .* auto can"):
        choose(name, CPU)
    gpu = Call(platform="gpu", queries=256, keys=256, head_width=64, dtype="bfloat16", ordered=True, packed=True)
    with pytest.raises(UserError, match="no segments"):
        choose("cudnn", gpu)


@pytest.mark.parametrize("mesh", [MeshConfig(), MeshConfig(data=2, fsdp=2, tensor=2)], ids=["one", "eight"])
def test_the_model_s_gradients_are_the_same_by_either_kernel(mesh: MeshConfig) -> None:
    found = []
    for name in ("plain", "blockwise"):
        experiment: Experiment = small.experiment(
            mesh=mesh, context=160, attention=Attention(kernel=name), train={"batch": 4}
        )
        with jax.set_mesh(make_mesh(mesh)):
            state, batch = small.place(experiment, small.state(experiment)), small.place_batch(small.batch(experiment))
            sums, gradients = small.jit(sum_gradients, static_argnums=0)(experiment, state, batch)
            found.append([np.asarray(x) for x in jax.tree.leaves((sums, gradients))])
    for a, b in zip(*found, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 * max(1, np.abs(a).max()), rtol=0)


def test_the_kernel_is_a_setting_like_any_other() -> None:
    assert Model().attention.kernel == "auto"


@fuzz(max_examples=12, deadline=None)
@given(st.data())
def test_a_single_query_is_the_reference(data: Any) -> None:
    """Of a cache of any size, with keys that it does not see, in rows of unlike length."""
    B, S, K, G, H = (data.draw(st.integers(1, n)) for n in (3, 9, 3, 3, 5))
    at_B1 = np.array([[data.draw(st.integers(-1, S))] for _ in range(B)], np.int32)
    mask = Mask(jnp.asarray(at_B1), jnp.arange(S, dtype=jnp.int32)[None])
    x = given_arrays(data.draw(st.integers(0, 99)), B, 1, S, K, G, H, mask, jnp.float32)
    found = np.asarray(small.jit(lambda x: kernels.attend("auto", x.q, x.k, x.v, x.mask))(x))
    np.testing.assert_allclose(found, reference(x), atol=1e-5)
    one_by_one = small.jit(kernels.plain)(x.q, x.k, x.v, x.mask)
    np.testing.assert_allclose(found, one_by_one, atol=1e-5)
