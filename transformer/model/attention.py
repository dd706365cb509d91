"""The table of kinds of attention. A new kind is one file and one row here."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from flax import linen as nn

from transformer.errors import UserError
from transformer.model import cache, grouped, kernels, scores, spans
from transformer.model.grouped import Grouped, MultiHead, MultiQuery
from transformer.model.positions import Learned, Relative, Sinusoidal
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

    projection: MultiHead | MultiQuery | Grouped = MultiHead()
    span: Global | Sliding | Chunked | Pattern = Global()
    scores: Softmax | Sigmoid = Softmax()
    qk_norm: Literal["none", "head", "width"] = "none"  # over what queries and keys are normed before their product
    gate: bool = False  # what a head mixed is multiplied by a sigmoid of the block's input: arXiv:2505.06708
    kernel: kernels.Name = "auto"  # plain writes out the n x n table; the others give the same in linear memory


class Kind(NamedTuple):
    """What the rest of the program asks of a kind of attention.

    ``module(config)(x, mask, rotation, view) -> (x, cache)``; ``check(config)`` raises UserError;
    ``allocate(config, rows, places)`` is one block's empty cache;
    ``cache_numbers(config)`` is how many numbers one token costs in one block's cache;
    ``matrices(config)`` counts the weights of one block's products, ``rest(config)`` its other weights, and
    ``products(config, keys)`` the multiply-adds of a token that looks at ``keys`` keys, beyond those of its weights.
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


def kernels_for_training(config: Model) -> dict[str, str]:
    """The kernels that packed rows of a whole context are trained with on the mesh's devices, and why it is those."""
    chosen = {}
    for i in range(spans.period(config.attention.span)):
        block = config.block(i)
        call = kernels.Call(
            platform=platform(),
            queries=config.context,
            keys=config.context,
            head_width=config.head_size,
            dtype=config.dtype,
            ordered=devices() == 1,
            packed=True,
            options=options(block),
            **spans.limits(block.attention.span),
        )
        name, why = kernels.choose(config.attention.kernel, call)
        chosen[name] = why
    return chosen


def _kv(config: Model) -> int:
    return config.attention.projection.kv_count(config.heads)


def _check(config: Model) -> None:
    kv = _kv(config)
    if kv < 1 or config.heads % kv:
        raise UserError(
            f"config.model.attention.projection.kv_heads: {config.heads} query heads do not divide over {kv} "
            f"key/value heads{_divisors(config.heads)}"
        )
    spans.check(config)
    scores.check(config)
    kernel = config.attention.kernel
    if kernel != "auto" and (option := kernels.KERNELS[kernel].lacks(options(config))):
        raise UserError(f"config.model.attention.kernel: {kernel} knows no {option}; auto can")


def _divisors(number: int) -> str:
    return " (possible: " + ", ".join(str(d) for d in range(1, number + 1) if number % d == 0) + ")"


def _allocate(config: Model, rows: int, places: int) -> Any:
    places = min(places, spans.reach(config.attention.span) or places)
    return cache.allocate(rows, places, _kv(config), config.head_size, config.dtype)


def _heads(config: Model) -> int:
    return config.heads + 2 * _kv(config) + (config.heads if config.attention.gate else 0)  # query, key, value, gate


def _matrices(config: Model) -> int:
    return (_heads(config) + config.heads) * config.head_size * config.width


def _rest(config: Model) -> int:
    attention, H = config.attention, config.head_size
    normed = {"none": 0, "head": 2 * H, "width": (config.heads + _kv(config)) * H}[attention.qk_norm]
    sinks = config.heads if isinstance(attention.scores, Softmax) and attention.scores.sinks else 0
    distances = config.positions.buckets * config.heads if isinstance(config.positions, Relative) else 0
    return normed + sinks + distances + (_heads(config) * H + config.width if config.bias else 0)


_GROUPED = Kind(
    module=grouped.GroupedAttention,
    check=_check,
    allocate=_allocate,
    cache_numbers=lambda c: 2 * _kv(c) * c.head_size,
    matrices=_matrices,
    rest=_rest,
    products=lambda c, keys: 2 * keys * c.heads * c.head_size,  # scores, then the mix of values
    cache_scales=lambda c: 2 * _kv(c),
    rewinds=True,
)

KINDS: dict[type, Kind] = {MultiHead: _GROUPED, MultiQuery: _GROUPED, Grouped: _GROUPED}


def kind(config: Model) -> Kind:
    """The row of the model's kind of attention."""
    return KINDS[type(config.attention.projection)]
