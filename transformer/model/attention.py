"""The table of kinds of attention. A new kind is one file and one row here."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from flax import linen as nn

from transformer.errors import UserError
from transformer.model import cache, grouped, kernels
from transformer.model.grouped import Grouped, MultiHead, MultiQuery
from transformer.settings import settings

if TYPE_CHECKING:
    from transformer.model.config import Model


@settings
class Attention:
    """How a block's positions look at one another."""

    projection: MultiHead | MultiQuery | Grouped = MultiHead()
    kernel: kernels.Name = "auto"  # plain writes out the n x n table; the others give the same in linear memory


class Kind(NamedTuple):
    """What the rest of the program asks of a kind of attention.

    ``module(config)(x, mask, rotation, view) -> (x, cache)``; ``check(config)`` raises UserError;
    ``allocate(config, rows, places)`` is one block's empty cache;
    ``cache_numbers(config)`` is how many numbers one token costs in one block's cache;
    ``weights(config)`` counts one block's parameters, ``biases(config)`` those of them that a model
    with biases has for biases, and ``products(config, keys)`` the multiply-adds of a token that looks
    at ``keys`` keys, beyond those of its weights.
    """

    module: type[nn.Module]
    check: Callable[[Model], None]
    allocate: Callable[[Model, int, int], Any]
    cache_numbers: Callable[[Model], int]
    weights: Callable[[Model], int]
    biases: Callable[[Model], int]
    products: Callable[[Model, float], float]


def _kv(config: Model) -> int:
    return config.attention.projection.kv_count(config.heads)


def _check(config: Model) -> None:
    kv = _kv(config)
    if kv < 1 or config.heads % kv:
        raise UserError(
            f"config.model.attention.projection.kv_heads: {config.heads} query heads do not divide over {kv} "
            f"key/value heads{_divisors(config.heads)}"
        )


def _divisors(number: int) -> str:
    return " (possible: " + ", ".join(str(d) for d in range(1, number + 1) if number % d == 0) + ")"


def _allocate(config: Model, rows: int, places: int) -> Any:
    return cache.allocate(rows, places, _kv(config), config.head_size, config.dtype)


def _weights(config: Model) -> int:
    heads = 2 * config.heads + 2 * _kv(config)  # query and out, key and value
    return heads * config.head_size * config.width + (_biases(config) if config.bias else 0)


def _biases(config: Model) -> int:
    return (config.heads + 2 * _kv(config)) * config.head_size + config.width


_GROUPED = Kind(
    module=grouped.GroupedAttention,
    check=_check,
    allocate=_allocate,
    cache_numbers=lambda c: 2 * _kv(c) * c.head_size,
    weights=_weights,
    biases=_biases,
    products=lambda c, keys: 2 * keys * c.heads * c.head_size,  # scores, then the mix of values
)

KINDS: dict[type, Kind] = {MultiHead: _GROUPED, MultiQuery: _GROUPED, Grouped: _GROUPED}


def kind(config: Model) -> Kind:
    """The row of the model's kind of attention."""
    return KINDS[type(config.attention.projection)]
