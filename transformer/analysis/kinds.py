"""The speed of attention, kind by kind: forward, forward and backward, and one token with a cache.

Each of them is one block's attention with its products, on one row of random numbers, beside the same block with the
plain kernel and beside the floor: its FLOPs over the rate of a matrix product, or for a token its weights and cache
over the memory bandwidth. Kinds are read off the settings themselves, so a new row of the table shows up here.

T positions, D model width.
"""

import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from transformer.errors import UserError
from transformer.model import attention, spans
from transformer.model.attention import KINDS, Attention
from transformer.model.cache import View
from transformer.model.config import Model
from transformer.model.config import check as check_model
from transformer.model.masks import Mask, causal
from transformer.model.positions import POSITIONS, Rotary
from transformer.model.scores import Sigmoid, Softmax
from transformer.model.spans import Chunked, Sliding
from transformer.settings import tag_of

WIDTH, HEADS, CONTEXT = 384, 6, 1024
ROUNDS = 5
FLOAT32 = 4


def kinds() -> Iterator[tuple[str, Model]]:
    """Every projection of the table; then every span and every kind of scores, with the first projection."""
    first = next(iter(KINDS))
    choices: list[dict[str, Any]] = [{"projection": kind()} for kind in KINDS]
    choices += [{"projection": first(), "span": span} for span in (Sliding(), Chunked())]
    choices += [{"projection": first(), "scores": scores} for scores in (Softmax(sinks=True), Sigmoid())]
    for choice in choices:
        name = " ".join(tag_of(type(part)) for part in choice.values())
        model = Model(depth=1, width=WIDTH, heads=HEADS, context=CONTEXT, positions=Rotary())
        model = dataclasses.replace(model, attention=Attention(**choice))
        check_model(model)
        yield name + (" sinks" if getattr(model.attention.scores, "sinks", False) else ""), model


def measure(limits: dict[str, float], say: Callable[[str], None]) -> list[dict[str, Any]]:
    """A row for each kind, in milliseconds. ``limits`` has the rates of this machine, measured in the same run."""
    rows = []
    for name, model in kinds():
        say(f"attention of a block: {name}")
        plain = with_plain_kernel(model)
        found = works(model) | ({f"plain_{what}": work for what, work in works(plain).items()} if plain else {})
        found.pop("plain_decode", None)  # a single query has no table: there all kernels are the plain one
        times, floor = take_turns(found), floors(model, limits)
        row: dict[str, Any] = {"kind": name}
        for what in floor:
            row |= {what: 1e3 * times[what]}
            row |= {f"plain_{what}": 1e3 * times[f"plain_{what}"]} if f"plain_{what}" in times else {}
            row |= {f"{what}_floor": 1e3 * floor[what]}
        rows.append(row)
    return rows


def with_plain_kernel(model: Model) -> Model | None:
    """The same with the score table written out; None for a kind that has none."""
    plain = dataclasses.replace(model, attention=dataclasses.replace(model.attention, kernel="plain"))
    try:
        check_model(plain)
    except UserError:
        return None
    return plain


def works(model: Model) -> dict[str, Callable[[], Any]]:
    """What is timed, each compiled and run once."""
    T, D = model.context, model.width
    row = attention.kind(model)
    block = row.module(model)
    x_1TD = jax.random.normal(jax.random.key(0), (1, T, D), jnp.dtype(model.dtype))
    index_1T = jnp.arange(T, dtype=jnp.int32)[None]

    def rotation(index_1T: jax.Array) -> Any:
        signal: Any = POSITIONS[type(model.positions)](model).apply({}, index_1T)
        return signal.rotation

    params = jax.jit(lambda key: block.init(key, x_1TD, causal(T), rotation(index_1T))["params"])(jax.random.key(1))
    cache = row.allocate(model, 1, T)

    def forward(params: Any, x_1TD: jax.Array) -> jax.Array:
        return block.apply({"params": params}, x_1TD, causal(T), rotation(index_1T))[0]

    def decode(params: Any, x_11D: jax.Array, cache: Any) -> Any:
        last_11 = index_1T[:, -1:]
        return block.apply({"params": params}, x_11D, Mask(last_11, index_1T), rotation(last_11), View(cache, last_11))

    grown = jax.jit(jax.grad(lambda params, x_1TD: (forward(params, x_1TD) ** 2).sum(), (0, 1)))
    once, token = jax.jit(forward), jax.jit(decode, donate_argnums=2)

    def one_token() -> Any:
        nonlocal cache
        y_11D, cache = token(params, x_1TD[:, -1:], cache)
        return y_11D

    found = {
        "forward": lambda: once(params, x_1TD),
        "forward_and_backward": lambda: grown(params, x_1TD),
        "decode": one_token,
    }
    jax.block_until_ready([work() for work in found.values()])
    return found


def take_turns(found: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """The median seconds of each, all of them in turn."""
    times: dict[str, list[float]] = {name: [] for name in found}
    for _ in range(ROUNDS):
        for name, work in found.items():
            start = time.perf_counter()
            jax.block_until_ready(work())
            times[name].append(time.perf_counter() - start)
    return {name: sorted(each)[ROUNDS // 2] for name, each in times.items()}


def floors(model: Model, limits: dict[str, float]) -> dict[str, float]:
    """Seconds that the machine's rates allow at best. Backward is twice forward; keys are those that a query sees on
    average, not the whole table."""
    T, row = model.context, attention.kind(model)
    mask = dataclasses.replace(causal(T), **spans.limits(model.attention.span))
    keys = float(mask.visible_BTS().sum()) / T
    forward = 2 * T * (row.matrices(model) + row.products(model, keys)) / limits["matmul_float32"]
    held = sum(x.nbytes for x in jax.tree.leaves(row.allocate(model, 1, T)))
    read = FLOAT32 * (row.matrices(model) + row.rest(model)) + held
    return {
        "forward": forward,
        "forward_and_backward": 3 * forward,
        "decode": read / limits["memory_bandwidth"],
    }
