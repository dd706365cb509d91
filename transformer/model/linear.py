"""Linear attention with a decay gate: a state of fixed size in place of keys, in two forms that agree.

Gated linear attention, arXiv:2312.06635, with one decay for each head and position (as in Mamba-2, arXiv:2405.21060,
section 6, whose form in chunks this is). With a state S of H x V numbers for each head, at first zero:

    S_t = d_t S_(t-1) + k_t v_t,    head_t = norm(q_t S_t / sqrt(H)),    d_t = sigmoid(W x_t + b)^(1/slowness)

Recurrent: one token after the other, for generation. In chunks: what positions of a chunk give one another is a table
of scores times the decay between them, exp(sum of log d); what came before is the state at the chunk's start. Only sums
of log d within one document are ever taken, so no decay is a quotient: nothing overflows, and no bit of a document
depends on its neighbours. A new document begins with an empty state.

B rows, T positions, Z chunks, t and s positions of one chunk, D model width, N heads, H width of a head's queries and
keys, V of its values (H too).
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from transformer.errors import UserError
from transformer.model.cache import View
from transformer.model.heads import HeadNorm, back, placed, project
from transformer.model.layers import Einsum
from transformer.model.masks import FAR, Mask
from transformer.model.place import FIRST, Place, residual_weights, values
from transformer.model.positions import Alibi, Relative
from transformer.model.scores import Softmax
from transformer.model.spans import Global
from transformer.parallel.rules import each_device, spec
from transformer.settings import settings

if TYPE_CHECKING:
    from transformer.model.config import Model

CHUNK = 64  # positions whose scores are written out at once


@settings
class Linear:
    """A state that decays and that every key and value is added to. arXiv:2312.06635, arXiv:2405.21060."""

    slowness: float = 16.0  # a decay is a sigmoid to the power of 1 over this: arXiv:2312.06635, section 4.4


class State(NamedTuple):
    """All that is remembered of a text, float32."""

    s_BNHV: jax.Array


class LinearAttention(nn.Module):
    config: Model
    normed = True  # its heads, behind `mix`: only proportions of their weights count

    @nn.compact
    def __call__(
        self,
        x_BTD: jax.Array,
        mask: Mask,
        rotation: Any = None,
        view: View | None = None,
        place: Place = FIRST,
    ) -> tuple[jax.Array, Any]:
        c, N = self.config, self.config.heads
        q_BTNH, k_BTNH = project(c, x_BTD, "query", N), project(c, x_BTD, "key", N)
        q_BTNH, k_BTNH = placed(c, q_BTNH, k_BTNH, rotation)
        q_BTNH = q_BTNH * c.head_size**-0.5
        v_BTNV = values(self, c, x_BTD, N, place)
        axes, out = ("width", "heads"), ("batch", "time", "heads")
        gate_BTN = Einsum((c.width, N), axes, out, c.init_std, bias=True, name="decay")("BTD,DN->BTN", x_BTD)
        decay_BTN = jax.nn.log_sigmoid(gate_BTN.astype(jnp.float32)) / settings_of(c).slowness

        state, segments_BT = None, mask.query_segment_BT
        if view is not None:  # what is not written, behind a prompt or in a row that has ended, changes nothing
            state, segments_BT = view.cache.s_BNHV, None
            written_BT = (view.index_BT < FAR)[:, :, None]
            k_BTNH = jnp.where(written_BT[..., None], k_BTNH, 0)
            decay_BTN = jnp.where(written_BT, decay_BTN, 0)
        y_BTNV, state = self.mix(q_BTNH, k_BTNH, v_BTNV, decay_BTN, segments_BT, state)
        y_BTNV = HeadNorm(c, "heads", "head", name="norm")(y_BTNV).astype(x_BTD.dtype)
        return back(c, y_BTNV, x_BTD), None if view is None else State(state)

    def mix(self, q_BTNH: jax.Array, k: jax.Array, v: jax.Array, decay: jax.Array, segments: Any, state: Any) -> Any:
        """What each query reads, float32 [B, T, N, V], and the state behind the last of them."""
        run = recurrent if state is not None and q_BTNH.shape[1] == 1 else chunked
        return on_each_device(run, q_BTNH, k, v, decay, segments, state)


def on_each_device(run: Any, q: jax.Array, k: jax.Array, v: jax.Array, decay: jax.Array, segments: Any, s: Any) -> Any:
    """``run`` on each device's own rows and heads."""
    given: tuple[Any, ...] = (q, k, v, decay, segments, s)
    if jax.sharding.get_abstract_mesh().empty:
        return run(*given)
    heads, states = spec("batch", "time", "heads", None), spec("batch", "heads", None, None)
    layouts = (heads, heads, heads, spec("batch", "time", "heads"), spec("batch", "time"), states)
    specs = tuple(None if x is None else layout for x, layout in zip(given, layouts, strict=True))
    given = tuple(None if x is None else jax.reshard(x, layout) for x, layout in zip(given, layouts, strict=True))
    return each_device(run, in_specs=specs, out_specs=(heads, states), check_vma=False)(*given)


def recurrent(
    q_BTNH: jax.Array, k_BTNH: jax.Array, v_BTNV: jax.Array, decay_BTN: jax.Array, segments_BT: None, s_BNHV: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """One token (T is 1): what it reads, float32 [B, T, N, V], and the state with it."""
    q_BNH, k_BNH, v_BNV = (x[:, 0].astype(jnp.float32) for x in (q_BTNH, k_BTNH, v_BTNV))
    s_BNHV = jnp.exp(decay_BTN[:, 0])[..., None, None] * s_BNHV + k_BNH[..., None] * v_BNV[:, :, None]
    return jnp.einsum("BNH,BNHV->BNV", q_BNH, s_BNHV)[:, None], s_BNHV


def chunked(
    q_BTNH: jax.Array,
    k_BTNH: jax.Array,
    v_BTNV: jax.Array,
    decay_BTN: jax.Array,
    segments_BT: jax.Array | None = None,
    s_BNHV: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Many tokens: what each reads, float32 [B, T, N, V], and the state after them.

    ``decay`` is log d. Documents lie one behind the other; 0 in ``segments`` is padding, which neither reads nor is
    read. A state that is given is that of the document that row begins with, without ``segments``.
    """
    B, T = q_BTNH.shape[:2]
    C, dtype = min(CHUNK, T), q_BTNH.dtype
    dot = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)

    def chunks(x: jax.Array, fill: int = 0) -> jax.Array:
        """[B, Z, C, ...], with positions added at the end."""
        sizes = ((0, 0), (0, -T % C)) + ((0, 0),) * (x.ndim - 2)
        x = jnp.pad(x, sizes, constant_values=fill)
        return x.reshape(B, -1, C, *x.shape[2:])

    q_BZNtH, k_BZNsH, v_BZNsV = (chunks(x).transpose(0, 1, 3, 2, 4) for x in (q_BTNH, k_BTNH, v_BTNV))
    if segments_BT is None:
        id_BZt = chunks(jnp.ones((B, T), jnp.int32), fill=1)
    else:
        id_BZt = chunks(segments_BT)
    starts_BZt = jnp.pad(id_BZt[:, :, 1:] != id_BZt[:, :, :-1], ((0, 0), (0, 0), (1, 0)))
    since_BZNt = running(chunks(decay_BTN).transpose(0, 1, 3, 2), starts_BZt[:, :, None])

    # Within a chunk: position t reads s, of the same document and not later.
    same_BZts = (id_BZt[..., :, None] == id_BZt[..., None, :]) & (id_BZt > 0)[..., None]
    sees_BZ1ts = (same_BZts & jnp.tri(C, dtype=bool)[None, None])[:, :, None]
    decay_BZNts = masked_exp(since_BZNt[..., :, None] - since_BZNt[..., None, :], sees_BZ1ts)
    scores_BZNts = (dot("BZNtH,BZNsH->BZNts", q_BZNtH, k_BZNsH) * decay_BZNts).astype(dtype)
    within_BZNtV = dot("BZNts,BZNsV->BZNtV", scores_BZNts, v_BZNsV)

    # Across chunks: what the last position of each leaves, and what lasts of what was there before.
    left_BZNsH = (k_BZNsH * decay_BZNts[..., -1, :, None]).astype(dtype)
    added_BZNHV = dot("BZNsH,BZNsV->BZNHV", left_BZNsH, v_BZNsV)
    before_BZ1 = jnp.pad(id_BZt[:, :-1, -1:], ((0, 0), (1, 0), (0, 0)), constant_values=1)  # whose state it begins with
    lasts_BZNt = masked_exp(since_BZNt, ((id_BZt == before_BZ1) & (id_BZt > 0))[:, :, None])

    def follow(s_BNHV: jax.Array, chunk: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        added_BNHV, lasts_BN = chunk
        return lasts_BN[..., None, None] * s_BNHV + added_BNHV, s_BNHV

    start_BNHV = jnp.zeros_like(added_BZNHV[:, 0]) if s_BNHV is None else s_BNHV
    each = (jnp.moveaxis(added_BZNHV, 1, 0), jnp.moveaxis(lasts_BZNt[..., -1], 1, 0))
    end_BNHV, s_ZBNHV = jax.lax.scan(follow, start_BNHV, each)
    read_BZNtH = (q_BZNtH * lasts_BZNt[..., None]).astype(dtype)
    across_BZNtV = dot("BZNtH,ZBNHV->BZNtV", read_BZNtH, s_ZBNHV.astype(dtype))
    y_BZtNV = (within_BZNtV + across_BZNtV).transpose(0, 1, 3, 2, 4)
    return y_BZtNV.reshape(B, -1, *y_BZtNV.shape[3:])[:, :T], end_BNHV


def masked_exp(x: jax.Array, seen: jax.Array) -> jax.Array:
    """exp(x), and 0 where nothing is seen, whatever stands there: neither it nor its gradient overflows."""
    return jnp.where(seen, jnp.exp(jnp.where(seen, x, 0)), 0)


def running(x_BZNt: jax.Array, starts_BZ1t: jax.Array) -> jax.Array:
    """Sums of ``x`` along each chunk that begin anew at every start: none has a trace of what was before it."""

    def join(first: Any, second: Any) -> Any:
        (sum1, start1), (sum2, start2) = first, second
        return jnp.where(start2, sum2, sum1 + sum2), start1 | start2

    starts_BZNt = jnp.broadcast_to(starts_BZ1t, x_BZNt.shape)
    summed: tuple[jax.Array, jax.Array] = jax.lax.associative_scan(join, (x_BZNt, starts_BZNt), axis=-1)
    return summed[0]


def settings_of(c: Model) -> Linear:
    assert isinstance(c.attention.projection, Linear)
    return c.attention.projection


def check(c: Model) -> None:
    """UserError for what needs scores or keys: there are none."""
    a, where = c.attention, "config.model.attention"
    if settings_of(c).slowness <= 0:
        raise UserError(f"{where}.projection.slowness: {settings_of(c).slowness} is not above 0")
    if a.scores != Softmax():
        raise UserError(f"{where}.scores: linear attention has no scores to change; leave the usual ones")
    if not isinstance(a.span, Global):
        raise UserError(f"{where}.span: linear attention keeps a state and no keys to leave out; set global")
    if a.kernel != "auto":
        raise UserError(f"{where}.kernel: {a.kernel} is for tables of scores, linear attention has none; set auto")
    if isinstance(c.positions, Alibi | Relative):
        raise UserError("config.model.positions: linear attention has no scores that alibi or relative could add to")


def allocate(c: Model, rows: int, places: int) -> State:
    """The same for any number of places."""
    shape, layout = (rows, c.heads, c.head_size, c.head_size), spec("batch", "heads", None, None)
    return State(jnp.zeros(shape, jnp.float32, out_sharding=layout))


def matrices(c: Model) -> int:
    heads = 5 if c.attention.gate else 4
    return heads * c.heads * c.head_size * c.width + c.heads * c.width


def products(c: Model, keys: float) -> float:
    """In chunks: scores and the mix of values of a chunk's table, then a state's update and reading."""
    return 2 * c.heads * c.head_size * (min(CHUNK, keys) + c.head_size)


def rest(c: Model) -> int:
    N, H = c.heads, c.head_size
    normed = {"none": 0, "head": 2 * H, "width": 2 * N * H}[c.attention.qk_norm]
    heads = 4 if c.attention.gate else 3
    return N + H + normed + residual_weights(c) + (heads * N * H + c.width if c.bias else 0)
