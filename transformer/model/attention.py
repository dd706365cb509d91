"""The table of kinds of attention. A new kind is one file and one row here."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from flax import linen as nn

from transformer.errors import UserError
from transformer.model import differential, grouped, kernels, latent, linear, scores, spans
from transformer.model.differential import Differential
from transformer.model.grouped import Grouped, MultiHead, MultiQuery
from transformer.model.latent import Latent
from transformer.model.linear import Linear
from transformer.model.positions import Learned, Sinusoidal
from transformer.model.scores import Sigmoid, Softmax, options
from transformer.model.spans import Chunked, Global, Pattern, Sliding
from transformer.parallel.context import devices
from transformer.parallel.mesh import platform
from transformer.settings import settings, tag_of

if TYPE_CHECKING:
    from transformer.model.config import Model


@settings
class Attention:
    """How a block's positions look at one another."""

    projection: Any = MultiHead()  # one of the settings that have a row in KINDS, which gives this its type
    span: Global | Sliding | Chunked | Pattern = Global()
    scores: Softmax | Sigmoid = Softmax()
    qk_norm: Literal["none", "head", "width"] = "none"  # over what queries and keys are normed before their product
    bias: Literal["as_model", "none", "qkv", "all"] = "as_model"  # biases of the products here
    score_width: float | None = None  # scores are divided by its root; none: by that of the head's width
    gate: bool = False  # what a head mixed is multiplied by a sigmoid of the block's input: arXiv:2505.06708
    value_residual: Literal["none", "fixed", "learned"] = "none"  # the first block's values in later ones: see `place`
    kernel: kernels.Name = "auto"  # plain writes out the n x n table; the others give the same in linear memory

    def biased(self, bias: bool) -> tuple[bool, bool]:
        """Whether the products with the block's input have biases (query, key, value, gate), and whether the one back
        to the stream has, where the model's own setting is ``bias``."""
        return {"as_model": (bias, bias), "none": (False, False), "qkv": (True, False), "all": (True, True)}[self.bias]


class Kind(NamedTuple):
    """What the rest of the program asks of a kind of attention.

    ``module(config)(x, mask, rotation, view, place) -> (x, cache)``; ``check(config)`` raises UserError;
    ``allocate(config, rows, places)`` is one block's empty cache;
    ``cache_numbers(config)`` is how many numbers one token costs in one block's cache;
    ``matrices(config)`` counts the weights of one block's products, ``rest(config)`` its other weights, and
    ``products(config, keys)`` the multiply-adds of a token that looks at ``keys`` keys, beyond those of its weights;
    ``activations(config)`` is about how many numbers of a token its backward pass needs, but for score tables;
    ``widths(config)`` are the widths of a head's keys and values as kernels see them, None where there is no kernel;
    ``rotated(config)`` is how much of a head rotary positions may turn; ``tables`` is how many score tables a head has.
    ``recurrent(config)`` is the size of the state that it keeps of a text of any length, in place of keys: such a kind
    has no limit of its own to the length of a text, needs whole rows on each device, and cannot take a token back.
    ``cache_scales(config)`` is how many scales a token has in one block's int8 cache; None where there is no such
    cache. ``rewinds`` is whether tokens that were written ahead into its cache can be turned down again.
    """

    module: type[nn.Module]
    check: Callable[[Model], None]
    allocate: Callable[[Model, int, int], Any]
    cache_numbers: Callable[[Model], int]
    matrices: Callable[[Model], int]
    rest: Callable[[Model], int]
    products: Callable[[Model, float], float]
    activations: Callable[[Model], int]
    widths: Callable[[Model], tuple[int, int] | None]
    rotated: Callable[[Model], int]
    tables: int = 1
    recurrent: Callable[[Model], int] | None = None
    cache_scales: Callable[[Model], int] | None = None
    rewinds: bool = False


def reach(config: Model, i: int) -> int:
    """How many keys a query of block ``i`` sees at the end of a whole context."""
    return min(spans.reach(spans.of_block(config.attention.span, i)) or config.context, config.context)


def endless(config: Model) -> bool:
    """Whether text may go on beyond the context: no block looks further back than it has learned to, and positions are
    known by their distance."""
    blocks = [config.block(i) for i in range(spans.period(config.attention.span))]
    far = isinstance(config.positions, Learned | Sinusoidal)
    if kind(config).recurrent is not None:
        return not far
    return not far and all(spans.reach(b.attention.span) is not None for b in blocks)


def check_cache(config: Model, int8: bool, ahead: int, whose: str = "") -> None:
    """UserError where the cache of this kind of attention has no int8 form, or cannot turn down what it was given."""
    row, name = kind(config), tag_of(type(config.attention.projection))
    if int8 and row.cache_scales is None:
        raise UserError(f"--int8_cache: the cache of {name} attention{whose} has no int8 form; leave it out")
    if ahead and not row.rewinds:
        raise UserError(
            f"--draft: the cache of {name} attention{whose} cannot turn down tokens that it was given; leave it out"
        )


def training_call(block: Model, platform: str, ordered: bool) -> kernels.Call | None:
    """What a block (`Model.block`) asks of a kernel for packed rows of a whole context; None where it needs none."""
    widths = kind(block).widths(block)
    if widths is None:
        return None
    return kernels.Call(
        platform=platform,
        queries=block.context,
        keys=block.context,
        head_width=widths[0],
        value_width=widths[1],
        dtype=block.dtype,
        ordered=ordered,
        packed=True,
        options=options(block),
        **spans.limits(block.attention.span),
    )


def kernels_for_training(config: Model) -> dict[str, str]:
    """The kernels that packed rows of a whole context are trained with on the mesh's devices, and why it is those."""
    chosen = {}
    for i in range(spans.period(config.attention.span)):
        call = training_call(config.block(i), platform(), ordered=devices() == 1)
        if call is not None:
            name, why = kernels.choose(config.attention.kernel, call)
            chosen[name] = why
    return chosen


def check(config: Model) -> None:
    """UserError for attention that cannot be built."""
    kind(config).check(config)
    _check_heads(config)
    if config.attention.value_residual != "none" and config.depth * config.loops == 1:
        raise UserError("config.model.attention.value_residual: has no effect in a single block; leave it out")
    spans.check(config)
    scores.check(config)
    kernel = config.attention.kernel
    if kernel != "auto" and (option := kernels.KERNELS[kernel].lacks(options(config))):
        raise UserError(f"config.model.attention.kernel: {kernel} knows no {option}; auto can")


def _check_heads(config: Model) -> None:
    """UserError for biases and a divisor of scores that would do nothing, or that the kind does not know."""
    own = config.attention
    if not isinstance(own.projection, MultiHead | MultiQuery | Grouped):
        for name, usual in (("bias", "as_model"), ("score_width", None)):
            if getattr(own, name) != usual:
                raise UserError(f"config.model.attention.{name}: only multi_head, multi_query and grouped know of it")
    if own.bias != "as_model" and own.biased(config.bias) == (config.bias, config.bias):
        raise UserError(
            f"config.model.attention.bias: {own.bias!r} has no effect here: config.model.bias is {config.bias}"
        )
    width = (kind(config).widths(config) or (None,))[0]
    if own.score_width is not None and (own.score_width <= 0 or own.score_width == width):
        raise UserError(
            f"config.model.attention.score_width: {own.score_width} is not above 0, or is the head's own width; "
            "none for that"
        )


_GROUPED = Kind(
    module=grouped.GroupedAttention,
    check=grouped.check,
    allocate=grouped.allocate,
    cache_numbers=lambda c: 2 * grouped.kv_heads(c) * c.head_size,
    matrices=grouped.matrices,
    rest=grouped.rest,
    products=lambda c, keys: 2 * keys * c.heads * c.head_size,  # scores, then the mix of values
    activations=lambda c: 2 * (c.heads + grouped.kv_heads(c)) * c.head_size,  # queries and mixes, keys and values
    widths=lambda c: (c.head_size, c.head_size),
    rotated=lambda c: c.head_size,
    cache_scales=lambda c: 2 * grouped.kv_heads(c),
    rewinds=True,
)

KINDS: dict[type, Kind] = {
    MultiHead: _GROUPED,
    MultiQuery: _GROUPED,
    Grouped: _GROUPED,
    Latent: Kind(
        module=latent.LatentAttention,
        check=latent.check,
        allocate=latent.allocate,
        cache_numbers=lambda c: latent.rank(c) + latent.rotary(c),
        matrices=latent.matrices,
        rest=latent.rest,
        products=lambda c, keys: keys * c.heads * (2 * c.head_size + latent.rotary(c)),  # keys and values written out
        activations=lambda c: latent.rank(c) + 2 * c.heads * (2 * c.head_size + latent.rotary(c)),
        widths=lambda c: (c.head_size + latent.rotary(c), c.head_size),
        rotated=latent.rotary,
    ),
    Differential: _GROUPED._replace(
        module=differential.DifferentialAttention,
        check=differential.check,
        rest=differential.rest,
        products=lambda c, keys: 3 * keys * c.heads * c.head_size,  # two maps of half the width, two mixes
        activations=lambda c: 5 * c.heads * c.head_size,  # two mixes
        widths=lambda c: (c.head_size // 2, c.head_size),
        rotated=lambda c: c.head_size // 2,
        tables=2,
    ),
    Linear: Kind(
        module=linear.LinearAttention,
        check=linear.check,
        allocate=linear.allocate,
        cache_numbers=lambda c: 0,
        matrices=linear.matrices,
        rest=linear.rest,
        products=linear.products,
        activations=lambda c: 2 * c.heads * (2 * c.head_size + min(linear.CHUNK, c.context)),  # decays and scores
        widths=lambda c: None,
        rotated=lambda c: c.head_size,
        tables=0,
        recurrent=lambda c: c.heads * c.head_size**2,
    ),
}


def register(kind: type, row: Kind) -> None:
    """Add a kind to the table: its settings, whose name is its tag, and its row. Also from outside of the library."""
    KINDS[kind] = row
    Attention.__annotations__["projection"] = functools.reduce(operator.or_, KINDS)


for _settings, _row in list(KINDS.items()):
    register(_settings, _row)


def kind(config: Model) -> Kind:
    """The row of the model's kind of attention."""
    return KINDS[type(config.attention.projection)]
