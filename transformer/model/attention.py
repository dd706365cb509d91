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
from transformer.settings import settings

if TYPE_CHECKING:
    from transformer.model.config import Model


@settings
class Attention:
    """How a block's positions look at one another."""

    projection: MultiHead | MultiQuery | Grouped = MultiHead()
    span: Global | Sliding | Chunked | Pattern = Global()
    scores: Softmax | Sigmoid = Softmax()
    qk_norm: Literal["none", "head", "width"] = "none"  # over what queries and keys are normed before their product
    bias: Literal["as_model", "none", "qkv", "all"] = "as_model"  # biases of the products here
    score_width: float | None = None  # scores are divided by its root; none: by that of the head's width
    gate: bool = False  # what a head mixed is multiplied by a sigmoid of the block's input: arXiv:2505.06708
    kernel: kernels.Name = "auto"  # plain writes out the n x n table; the others give the same in linear memory

    def biased(self, bias: bool) -> tuple[bool, bool]:
        """Whether the products with the block's input have biases (query, key, value, gate), and whether the one back
        to the stream has, where the model's own setting is ``bias``."""
        return {"as_model": (bias, bias), "none": (False, False), "qkv": (True, False), "all": (True, True)}[self.bias]


class Kind(NamedTuple):
    """What the rest of the program asks of a kind of attention.

    ``module(config)(x, mask, rotation, view) -> (x, cache)``; ``check(config)`` raises UserError;
    ``allocate(config, rows, places)`` is one block's empty cache;
    ``cache_numbers(config)`` is how many numbers one token costs in one block's cache;
    ``matrices(config)`` counts the weights of one block's products, ``rest(config)`` its other weights, and
    ``products(config, keys)`` the multiply-adds of a token that looks at ``keys`` keys, beyond those of its weights.
    """

    module: type[nn.Module]
    check: Callable[[Model], None]
    allocate: Callable[[Model, int, int], Any]
    cache_numbers: Callable[[Model], int]
    matrices: Callable[[Model], int]
    rest: Callable[[Model], int]
    products: Callable[[Model, float], float]


def reach(config: Model, i: int) -> int:
    """How many keys a query of block ``i`` sees at the end of a whole context."""
    return min(spans.reach(spans.of_block(config.attention.span, i)) or config.context, config.context)


def endless(config: Model) -> bool:
    """Whether text may go on beyond the context: no block looks further back than it has learned to, and positions are
    known by their distance."""
    blocks = [config.block(i) for i in range(spans.period(config.attention.span))]
    far = isinstance(config.positions, Learned | Sinusoidal)
    return not far and all(spans.reach(b.attention.span) is not None for b in blocks)


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
    inner, outer = attention.biased(config.bias)
    return normed + sinks + distances + inner * _heads(config) * H + outer * config.width


_GROUPED = Kind(
    module=grouped.GroupedAttention,
    check=_check,
    allocate=_allocate,
    cache_numbers=lambda c: 2 * _kv(c) * c.head_size,
    matrices=_matrices,
    rest=_rest,
    products=lambda c, keys: 2 * keys * c.heads * c.head_size,  # scores, then the mix of values
)

KINDS: dict[type, Kind] = {MultiHead: _GROUPED, MultiQuery: _GROUPED, Grouped: _GROUPED}


def kind(config: Model) -> Kind:
    """The row of the model's kind of attention."""
    return KINDS[type(config.attention.projection)]
