"""Parametrisations: how initial weights, branches and updates change with the model's size, so that settings keep.

What was found good for a small *base* model (learning rate, initial std, weight decay, epsilon) is meant to be good
for a wider and deeper one if every size in it is multiplied by the right power of

    n = width / base width,    l = depth / base depth

and here are the powers, all in one place: those of the forward pass, which the model reads, and those of each weight
(`Rule`), which its initialisation and its optimizer read. At the base sizes both ratios are 1 and every
parametrisation is the standard one, to the bit. docs/parametrisations.md has the same as a table.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import jax

from transformer.errors import UserError
from transformer.settings import settings, tag_of

if TYPE_CHECKING:
    from transformer.model.config import Model
    from transformer.model.layers import Weight


@settings
class Standard:
    """GPT-2's: what writes to the stream begins smaller in a deeper model, and nothing else depends on the size."""


@settings
class Mup:
    """Over the width alone: arXiv:2203.03466, table 8, for AdamW as in arXiv:2505.01618, table 1."""

    base_width: int = 128
    base_head_width: int = 32


@settings
class DepthMup(Mup):
    """Mup, and over the depth branches that get smaller by 1/sqrt(l): arXiv:2310.02244, and table 1 with alpha 1/2."""

    base_depth: int = 4


@settings
class Completep(Mup):
    """Mup, and over the depth branches that get smaller by 1/l: arXiv:2505.01618, table 1 with alpha 1."""

    base_depth: int = 4


Parametrisation = Standard | Mup | DepthMup | Completep

KNOWN = ("multi_head", "multi_query", "grouped", "gelu", "swiglu", "geglu")  # what there are rules for
ALPHA: dict[type, float] = {DepthMup: 0.5, Completep: 1.0}  # a branch is multiplied by l^-alpha


class Ratios(NamedTuple):
    """Sizes over those of the base model; 1 where the parametrisation has no rule for them."""

    width: float = 1.0  # n
    depth: float = 1.0  # l
    head_width: float = 1.0
    alpha: float = 0.0


class Rule(NamedTuple):
    """What a weight's initial std, learning rate, epsilon and decay are multiplied by."""

    std: float = 1.0
    rate: float = 1.0
    epsilon: float = 1.0
    decay: float = 1.0


def ratios(model: Model) -> Ratios:
    p = model.parametrisation
    if not isinstance(p, Mup):
        return Ratios()
    width, head_width = model.width / p.base_width, model.head_size / p.base_head_width
    if isinstance(p, DepthMup | Completep):
        return Ratios(width, model.depth / p.base_depth, head_width, ALPHA[type(p)])
    return Ratios(width=width, head_width=head_width)


def branch(model: Model) -> float:
    """What the output of each residual branch is multiplied by."""
    r = ratios(model)
    return r.depth**-r.alpha


def before_logits(model: Model) -> float:
    """What the stream is multiplied by before the unembedding."""
    return 1 / ratios(model).width


def queries(model: Model) -> float:
    """What queries are multiplied by: scores are q k / H instead of q k / sqrt(H), and equal where H is the base's."""
    return ratios(model).head_width ** -0.5


def of_matrices(model: Model, residual: bool = False, muon: bool = False) -> Rule:
    """The rule of a block's products; ``residual`` for those that write to the stream.

    The initial std of the latter is that of the base's depth: it is the branch's factor that goes with the depth.
    Muon's update, being orthogonal, changes what comes out of a product by the square root of the width where AdamW's
    does by the width (arXiv:2310.17813, condition 1), and no epsilon is in it.
    """
    r = ratios(model)
    std = (r.depth / r.width if residual else 1 / r.width) ** 0.5
    slower = r.width**0.5 if muon else r.width
    return Rule(std, r.depth ** (r.alpha - 1) / slower, r.depth**-r.alpha / r.width, decay=slower)


def of_vectors(model: Model) -> Rule:
    """The rule of a block's biases, norm scales and tables of distances."""
    r = ratios(model)
    return Rule(rate=r.depth ** (r.alpha - 1), epsilon=r.depth**-r.alpha / r.width)


def rule(model: Model, w: Weight, muon: bool = False) -> Rule:
    """The rule of one weight, by its declaration; ``muon`` where that is what updates it."""
    if not w.stacked:
        return Rule()  # embedding, positions, unembedding (tied or not) and the norms around the blocks
    if w.role in ("matrix", "residual"):
        return of_matrices(model, w.role == "residual", muon)
    return of_vectors(model)


def times(x: jax.Array, factor: float) -> jax.Array:
    """``x * factor``; where the factor is 1 not even the program differs from one without it."""
    return x if factor == 1 else x * factor


def check(model: Model) -> None:
    """UserError for sizes that cannot be, and for models that a parametrisation has no rules for."""
    p, where = model.parametrisation, "config.model.parametrisation"
    if not isinstance(p, Mup):
        return
    for name in ("base_width", "base_head_width"):
        if getattr(p, name) < 1:
            raise UserError(f"{where}.{name}: {getattr(p, name)} is too small, set 1 or more")
    if (own := tag_of(type(model.attention.projection))) not in KNOWN:
        raise UserError(f"{where}: there are no rules for the weights of attention.projection={own}")
    if (own := tag_of(type(model.mlp))) not in KNOWN:
        raise UserError(f"{where}: there are no rules for the weights of mlp={own}")
    if not isinstance(p, DepthMup | Completep):
        return
    if p.base_depth < 1:
        raise UserError(f"{where}.base_depth: {p.base_depth} is too small, set 1 or more")
    if model.norms != "pre":
        raise UserError(f"{where}: its rules for the depth are those of pre-norm blocks, not of norms={model.norms}")
    if model.loops > 1:
        raise UserError(f"{where}: its rules for the depth are not those of blocks that are gone through in loops")
