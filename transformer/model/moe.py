"""A mixture of experts in the place of the MLP: a router sends each token through the few experts that suit it.

arXiv:2101.03961, with gated experts, several for a token and shared ones (arXiv:2401.06066). Nothing is dropped: tokens
are sorted by their experts, and one ragged product takes them all, however many an expert has.

B rows, T positions, D model width, E experts, C experts that a token goes through, F hidden width of an expert,
L blocks; of one device R tokens, P pairs of a token and an expert, and M of these that its own experts have, in the
order of experts.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from transformer.errors import UserError
from transformer.model.grouping import ragged_product
from transformer.model.layers import Einsum, weight
from transformer.model.mlp import STREAM, Mlp, Swiglu
from transformer.parallel.rules import each_device, mesh_axes, meshed, put, spec
from transformer.settings import settings

if TYPE_CHECKING:
    from transformer.model.config import Model


@settings
class Moe:
    """Experts as in ``swiglu``, of which each token goes through ``top_k`` and all ``shared`` ones."""

    experts: int = 8
    top_k: int = 2
    shared: int = 0  # experts more, that every token goes through with weight 1
    width: int | None = None  # of one expert; none: swiglu's, shared out over the experts that a token goes through
    scores: Literal["softmax", "sigmoid"] = "softmax"  # of all experts' logits, or each on its own (arXiv:2412.19437)
    normalise: bool = True  # the weights of the experts that were chosen sum to 1
    balance: float = 0.01  # weight of the load-balancing loss in the objective
    z_loss: float = 0.001  # weight of the squared log normaliser of the router's logits: arXiv:2202.08906, eq. 5

    def hidden(self, model_width: int) -> int:
        return self.width or -(-8 * model_width // (24 * (self.top_k + self.shared))) * 8

    def matrices(self, D: int) -> int:
        return D * self.experts + 3 * D * self.hidden(D) * (self.experts + self.shared)

    def idle(self, D: int, bias: bool = False) -> int:
        F = self.hidden(D)
        return (self.experts - self.top_k) * (3 * D * F + (2 * F + D if bias else 0))

    def biases(self, D: int) -> int:
        F = self.hidden(D)
        return self.experts * (1 + 2 * F + D) + (2 * F * self.shared + D if self.shared else 0)

    def kept(self, D: int) -> int:
        return self.experts + self.top_k * (3 * self.hidden(D) + 2 * D) + 3 * self.hidden(D) * self.shared


class Routing(NamedTuple):
    """How one block (or, stacked, each) spread a batch: sums over its target tokens, float32.

    Divided by the target tokens ``uneven`` is the load-balancing loss, 1 where all experts have equal shares and E
    where one has all. It is arXiv:2101.03961, eq. 4, E sum_e f_e P_e, with f_e the share of choices that fell on expert
    e and P_e the mean of its share of the scores, where "the batch" is each row by itself: so it is a sum over rows,
    the same however a batch is divided into parts or over devices. What does not count in the loss does not count here.
    """

    uneven: jax.Array
    z: jax.Array  # squared log normalisers
    chosen_E: jax.Array  # how often each expert was chosen


class Mixture(nn.Module):
    """Router and experts. ``counted_BT`` is how much each token counts, its target's weight; with it a `Routing` is put
    into the collection "routing"."""

    config: Model

    @nn.compact
    def __call__(self, x_BTD: jax.Array, counted_BT: jax.Array | None = None) -> jax.Array:
        c, moe = self.config, self.config.mlp
        assert isinstance(moe, Moe)
        D, E, F = c.width, moe.experts, moe.hidden(c.width)
        scored = ("batch", "time", "candidate")
        router = Einsum((D, E), ("width", "candidate"), scored, c.init_std, c.bias, name="router")
        with jax.default_matmul_precision("float32"):  # a choice is not a number that may be a little off
            logits_BTE = router("BTD,DE->BTE", x_BTD.astype(jnp.float32))
        scores_BTE, weights_BTC, chosen_BTC, hits_BTCE = route(moe, logits_BTE)
        if counted_BT is not None:
            self.put_variable("routing", "sums", routing(logits_BTE, scores_BTE, hits_BTCE, counted_BT))

        inner, outer = ("expert", "width", "mlp"), ("expert", "mlp", "width")
        experts = {
            name: weight(self, name, (E, D, F), inner, role="matrix", std=c.init_std, inputs=1)
            for name in ("gate", "up")
        }
        experts["down"] = weight(self, "down", (E, F, D), outer, role="residual", std=c.residual_std, inputs=1)
        if c.bias:
            for name in ("gate", "up"):
                experts[f"{name}_b"] = weight(self, f"{name}_b", (E, F), ("expert", "mlp"), role="bias", std=0.0)
        y_BTD = mixed(x_BTD, weights_BTC, chosen_BTC, experts)
        if c.bias:
            b_ED = weight(self, "down_b", (E, D), ("expert", "width"), role="bias", std=0.0)
            weights_BTE = jnp.where(hits_BTCE, weights_BTC[..., None], 0.0).sum(2)
            b_ED = put(b_ED, None, "stream")
            y_BTD = y_BTD + jnp.einsum("BTE,ED->BTD", weights_BTE, b_ED, out_sharding=spec(*STREAM)).astype(y_BTD.dtype)
        if moe.shared:
            dense = dataclasses.replace(c, mlp=Swiglu(width=moe.shared * F))
            y_BTD = y_BTD + Mlp(dense, name="shared")(x_BTD)
        return y_BTD


def route(moe: Moe, logits_BTE: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Every expert's score [B, T, E], float32; of those with the highest the weights, float32, and the numbers, both
    [B, T, C]; and these numbers as one true value among E."""
    scores_BTE = jax.nn.softmax(logits_BTE) if moe.scores == "softmax" else jax.nn.sigmoid(logits_BTE)

    def best(scores_BTE: jax.Array) -> jax.Array:
        return jax.lax.top_k(scores_BTE, moe.top_k)[1]

    choices: Any = spec("batch", "time", None)
    if choices is not None:  # left to itself XLA gathers the scores of all devices for it
        best = each_device(best, in_specs=choices, out_specs=choices)
    chosen_BTC = best(jax.lax.stop_gradient(scores_BTE))
    hits_BTCE = chosen_BTC[..., None] == jnp.arange(moe.experts)[None, None, None]
    weights_BTC = jnp.where(hits_BTCE, scores_BTE[:, :, None], 0.0).sum(-1)
    if moe.normalise:
        weights_BTC = weights_BTC / weights_BTC.sum(-1, keepdims=True)
    return scores_BTE, weights_BTC, chosen_BTC, hits_BTCE


def routing(logits_BTE: jax.Array, scores_BTE: jax.Array, hits_BTCE: jax.Array, counted_BT: jax.Array) -> Routing:
    """Sums over the tokens that count."""
    counts_BT1 = counted_BT[..., None] > 0

    def summed(x_BTE: jax.Array) -> jax.Array:
        return jnp.where(counts_BT1, x_BTE * counted_BT[..., None], 0.0).sum(1)

    C, E = hits_BTCE.shape[2:]
    chosen_BE = summed(hits_BTCE.sum(2).astype(jnp.float32))
    share_BE = summed(scores_BTE / scores_BTE.sum(-1, keepdims=True))
    tokens_B = jnp.where(counts_BT1[..., 0], counted_BT, 0.0).sum(1)
    uneven_B = E * (chosen_BE * share_BE).sum(-1) / (C * jnp.maximum(tokens_B, 1e-9))
    z_BT1 = jnp.square(jax.nn.logsumexp(logits_BTE, axis=-1, keepdims=True))
    return Routing(uneven_B.sum(), summed(z_BT1).sum(), chosen_BE.sum(0))


def mixed(x_BTD: jax.Array, weights_BTC: jax.Array, chosen_BTC: jax.Array, experts: dict[str, jax.Array]) -> jax.Array:
    """Each token's experts' results, weighted and summed, [B, T, D].

    Over the mesh's ``expert`` axis experts are cut, and rows too. The tokens of its devices are gathered, each device
    puts them through its own experts, and the sums go back to where the rows are. With shapes that are known before,
    an exchange that drops nothing needs room for all tokens on one device, which is what gathering moves.
    """
    experts = {name: w.astype(x_BTD.dtype) for name, w in experts.items()}
    if not meshed():
        return own_experts(x_BTD, weights_BTC, chosen_BTC, experts, 0)
    axes, cut = mesh_axes("expert"), mesh_axes("mlp")

    def one(x_BTD: jax.Array, weights_BTC: jax.Array, chosen_BTC: jax.Array, experts: Any) -> jax.Array:
        first, tokens = jax.lax.axis_index(axes) * experts["up"].shape[0], (x_BTD, weights_BTC, chosen_BTC)
        for axis in reversed(axes):
            tokens = jax.lax.all_gather(tokens, axis, axis=0, tiled=True)
        y_BTD = jax.lax.psum(own_experts(*tokens, experts, first), cut)
        for axis in axes:
            y_BTD = jax.lax.psum_scatter(y_BTD, axis, scatter_dimension=0, tiled=True)
        return y_BTD

    names = {"gate": ("expert", None, "mlp"), "down": ("expert", "mlp", None), "gate_b": ("expert", "mlp")}
    names |= {"up": names["gate"], "up_b": names["gate_b"]}
    experts = {name: put(w, *names[name]) for name, w in experts.items()}  # gathered where they are cut over fsdp
    rows, choices = spec(*STREAM), spec("batch", "time", None)
    specs: Any = (rows, choices, choices, {name: spec(*names[name]) for name in experts})
    given = (put(x_BTD, *STREAM), weights_BTC, chosen_BTC, experts)
    found: jax.Array = each_device(one, in_specs=specs, out_specs=rows)(*given)
    return found


def own_experts(
    x_BTD: jax.Array, weights_BTC: jax.Array, chosen_BTC: jax.Array, experts: dict[str, jax.Array], first: Any
) -> jax.Array:
    """``mixed`` of one device's experts, numbers ``first`` and on; those of others give nothing."""
    (B, T, D), C, E = x_BTD.shape, chosen_BTC.shape[2], experts["up"].shape[0]
    expert_RC = chosen_BTC.reshape(-1, C) - first
    here_RC = (expert_RC >= 0) & (expert_RC < E)
    expert_P = jnp.where(here_RC, expert_RC, E).reshape(-1)  # others' go to the end
    order_P = jnp.argsort(expert_P)
    M = B * T * min(C, E)  # a token goes through an expert once, so no more than these can be here
    count_E = (expert_P[:, None] == jnp.arange(E)[None]).sum(0)
    # Out and back by permutations that are each other's inverse: sums are over C alone and come in one order.
    pairs_M = jnp.where(jnp.arange(M) < count_E.sum(), order_P[:M], len(order_P))
    place_P = jnp.where(here_RC.reshape(-1), jnp.argsort(order_P), M)

    def taken(x: jax.Array, at: jax.Array) -> jax.Array:
        return x.at[at].get(mode="fill", fill_value=0)

    x_PD = jnp.broadcast_to(x_BTD.reshape(-1, 1, D), (B * T, C, D)).reshape(-1, D)
    x_MD = taken(x_PD, pairs_M)

    def widened(name: str) -> jax.Array:
        h_MF = ragged_product(x_MD, experts[name], count_E)
        return h_MF + taken(experts[f"{name}_b"], taken(expert_P, pairs_M)) if f"{name}_b" in experts else h_MF

    h_MF = jax.nn.silu(widened("gate")) * widened("up")
    y_PD = taken(ragged_product(h_MF, experts["down"], count_E), place_P)
    weights_RC = weights_BTC.reshape(-1, C).astype(x_BTD.dtype)
    return jnp.einsum("RCD,RC->RD", y_PD.reshape(-1, C, D), weights_RC).reshape(B, T, D)


def check(moe: Moe) -> None:
    """UserError for numbers that make no mixture."""
    where = "config.model.mlp"
    if moe.experts < 1 or moe.shared < 0:
        name, least = ("experts", 1) if moe.experts < 1 else ("shared", 0)
        raise UserError(f"{where}.{name}: {getattr(moe, name)} is too small, set {least} or more")
    if not 1 <= moe.top_k <= moe.experts:
        raise UserError(f"{where}.top_k: {moe.top_k} is not between 1 and the {moe.experts} experts")
    if moe.top_k == 1 and moe.experts > 1 and moe.normalise:
        raise UserError(
            f"{where}.normalise: a single expert's weight would always be 1, and the router learn nothing of the text; "
            "set false, or a larger top_k"
        )
    for name in ("balance", "z_loss"):
        if getattr(moe, name) < 0:
            raise UserError(f"{where}.{name}: {getattr(moe, name)} is below 0")
