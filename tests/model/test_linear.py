"""Linear attention: its two forms against NumPy and each other, documents apart to the bit, no limit to a text."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as fuzz
from hypothesis import strategies as st

from tests import small
from transformer.analysis.cost import cache, score_tables
from transformer.config import check
from transformer.errors import UserError
from transformer.generation.decode import Generator, continue_prompts
from transformer.generation.sampling import Sampling
from transformer.model import linear
from transformer.model.attention import Attention, kernels_for_training
from transformer.model.linear import Linear, chunked, recurrent
from transformer.model.positions import Alibi, Relative, Rotary
from transformer.model.scores import Sigmoid, Softmax
from transformer.model.spans import Sliding
from transformer.model.transformer import empty_cache
from transformer.parallel.mesh import Mesh


def arrays(seed: int, B: int, T: int, slow: float = 0.3) -> list[Any]:
    """Queries, keys, values and log decays."""
    random = np.random.default_rng(seed)
    q, k, v = (random.normal(size=(B, T, 2, 4)).astype(np.float32) for _ in range(3))
    return [q, k, v, -slow * random.exponential(size=(B, T, 2)).astype(np.float32)]


def by_hand(q: Any, k: Any, v: Any, decay: Any, segments: Any) -> np.ndarray:
    """Float64, each pair of positions on its own: q k times the decays after the key, up to the query."""
    q, k, v, decay = (np.asarray(x, np.float64) for x in (q, k, v, decay))
    out = np.zeros_like(v)
    for b, t, n in np.ndindex(q.shape[:3]):
        for s in range(t + 1):
            if segments[b, s] == segments[b, t] > 0:
                out[b, t, n] += np.exp(decay[b, s + 1 : t + 1, n].sum()) * (q[b, t, n] @ k[b, s, n]) * v[b, s, n]
    return out


@fuzz(max_examples=8, deadline=None)
@given(st.data())
def test_chunks_are_the_sum_over_pairs(data: Any) -> None:
    """Any length around those of chunks; documents and padding that begin anywhere, within chunks and at their ends."""
    T, size = data.draw(st.integers(1, 17)), data.draw(st.sampled_from([1, 4, 8]))
    starts = data.draw(st.lists(st.booleans(), min_size=2 * T, max_size=2 * T))
    segments = np.cumsum(np.reshape(starts, (2, T)), 1).astype(np.int32) + 1
    segments[1, T - data.draw(st.integers(0, T - 1)) :] = 0
    given_ = arrays(T, 2, T)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linear, "CHUNK", size)
        found = np.asarray(small.jit(lambda *x: chunked(*x)[0])(*given_, segments))
    np.testing.assert_allclose(found, by_hand(*given_, segments), atol=1e-5, rtol=0)


def test_without_decay_it_is_plain_unnormalised_linear_attention() -> None:
    """The causal half of (Q K^T) V, by NumPy."""
    q, k, v, decay = arrays(0, 2, 150)
    found, _ = small.jit(chunked)(q, k, v, 0 * decay)
    table = np.tril(np.einsum("btnh,bsnh->bnts", q, k).astype(np.float64))
    assert small.far(found, np.einsum("bnts,bsnv->btnv", table, v)) < 1e-5


@pytest.mark.parametrize("cut", [63, 64])
def test_both_forms_agree_wherever_one_hands_over_to_the_other(cut: int) -> None:
    """A text of 130 tokens: all at once; a part at once and the rest from its state, in chunks and one by one."""
    given_ = arrays(1, 2, 130)
    whole, end = small.jit(chunked)(*given_)
    first, state = small.jit(chunked)(*(x[:, :cut] for x in given_))
    rest, last = small.jit(chunked)(*(x[:, cut:] for x in given_), None, state)
    assert small.far(np.concatenate([first, rest], 1), whole) < 1e-5 and small.far(last, end) < 1e-5
    step, one = small.jit(lambda *x: recurrent(*x[:4], None, x[4])), state
    for t in range(cut, min(cut + 20, 130)):
        read, one = step(*(x[:, t : t + 1] for x in given_), one)
        assert small.far(read[:, 0], whole[:, t]) < 1e-5


def test_no_bit_of_a_document_depends_on_its_neighbours() -> None:
    """Also where these are huge, forget at once, and lie in the same chunk; gradients towards them are exactly zero."""
    given_, segments = arrays(2, 1, 100), np.repeat([[1, 2, 0]], [30, 60, 10], axis=1).astype(np.int32)
    run = small.jit(chunked)
    before, _ = run(*given_, segments)
    loud = [np.where((segments != 2)[..., None, None], 1e4 * x, x) for x in given_[:3]]
    loud.append(np.where((segments != 2)[..., None], np.float32(-1e4), given_[3]))
    after, _ = run(*loud, segments)
    assert np.array_equal(before[:, 30:90], after[:, 30:90])
    assert not np.asarray(after[:, 90:]).any()

    def read(*x: Any) -> jax.Array:
        return chunked(*x, jnp.asarray(segments))[0][:, 30:90].sum()

    for gradient in small.jit(jax.grad(read, (0, 1, 2, 3)))(*loud):
        assert np.isfinite(gradient).all()
        assert not np.asarray(gradient[:, :30]).any() and not np.asarray(gradient[:, 90:]).any()
        assert np.asarray(gradient[:, 31:89]).any()


@pytest.mark.exhaustive
def test_text_goes_on_beyond_the_context_from_a_state_of_fixed_size() -> None:
    """24 tokens with a context of 16: those of a model whose context holds them all."""
    found = []
    for context in (16, 32):
        e = small.experiment(attention=Attention(projection=Linear()), positions=Rotary(), context=context, depth=1)
        generator = Generator(e, Sampling(temperature=0.0), ())
        (*_, (row,)) = continue_prompts(generator, jax.tree.map(jnp.asarray, small.weights(e)), [[0, 5, 6]], 24)
        found.append(row.ids)
        assert [x.shape for x in jax.tree.leaves(empty_cache(e.model, 1, context))] == [(1, 4, 4, 4)]
    assert found[0] == found[1] and len(set(found[0])) > 3


def test_its_bill() -> None:
    e = small.experiment(attention=Attention(projection=Linear()), dtype="bfloat16", depth=3)
    assert cache(e) == {"bytes_per_token": 0, "bytes_per_context": 3 * 4 * 4 * 4 * 4}
    assert sum(x.nbytes for x in jax.tree.leaves(empty_cache(e.model, 1, 8))) == cache(e)["bytes_per_context"]
    assert not any(v for name, v in score_tables(e).items() if name != "rows_at_once")
    assert kernels_for_training(e.model) == {}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"scores": Sigmoid()}, "attention.scores: linear attention has no scores"),
        ({"scores": Softmax(sinks=True)}, "attention.scores: linear attention has no scores"),
        ({"span": Sliding()}, "attention.span: linear attention keeps a state"),
        ({"kernel": "plain"}, "attention.kernel: plain is for tables"),
        ({"positions": Alibi()}, "model.positions: linear attention has no scores"),
        ({"positions": Relative()}, "model.positions: linear attention has no scores"),
        ({"projection": Linear(slowness=0.0)}, "projection.slowness: 0.0 is not above 0"),
        ({"mesh": Mesh(context=2)}, "mesh.context: 2 devices .* set 1"),
    ],
)
def test_what_it_cannot_have_is_refused_by_name(settings: dict[str, Any], words: str) -> None:
    own = {"projection": Linear()} | {k: v for k, v in settings.items() if k not in ("positions", "mesh")}
    others = {k: v for k, v in settings.items() if k in ("positions", "mesh")}
    with pytest.raises(UserError, match=words):
        check(small.experiment(attention=Attention(**own), **others))
