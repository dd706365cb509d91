"""Take parts out of a trained model while it runs: blocks, attentions, MLPs, single heads; or change blocks' places.

What is kept travels as arrays among the weights (`altered`), so that one compiled program serves every change; calls of
modules are intercepted (`interfering`), so that the model has no line about it.

N heads, L blocks.
"""

from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from transformer.config import Experiment
from transformer.errors import UserError
from transformer.model.block import Block
from transformer.parallel.rules import meshed
from transformer.settings import tag_of

KEPT = "kept"  # the name beside a block's weights


class Change(NamedTuple):
    """What is done to a model; ones and places in order do nothing. In loops the same holds each time."""

    order_L: np.ndarray  # whose weights stand at each place; a span stays with its place
    blocks_L: np.ndarray  # 0: the stream passes the block by
    attention_L: (
        np.ndarray
    )  # 0: attention adds nothing (behind a norm after the sum: the stream is normed all the same)
    mlp_L: np.ndarray  # 0: the MLP adds nothing
    heads_LN: np.ndarray  # 0: the head gives zeros

    def to(self, **parts: Any) -> "Change":
        """With parts taken out: ``heads_LN=(2, 3)`` is head 3 of block 2, ``blocks_L=slice(2, None)`` all from 2 on."""
        changed = {}
        for name, where in parts.items():
            changed[name] = getattr(self, name).copy()
            changed[name][where] = 0
        return self._replace(**changed)


def unchanged(depth: int, heads: int) -> Change:
    ones_L = np.ones(depth, np.float32)
    return Change(np.arange(depth), ones_L, ones_L, ones_L, np.ones((depth, heads), np.float32))


def altered(params: Any, change: Change) -> Any:
    """The weights with their blocks in order, and what is kept beside them. For use inside ``jax.jit``."""

    def reordered(w: jax.Array) -> jax.Array:
        layout = jax.typeof(w).sharding.spec if meshed() else None
        return w.at[change.order_L].get(out_sharding=layout)

    kept = {name: value for name, value in change._asdict().items() if name != "order_L"}
    return {**params, "blocks": {**jax.tree.map(reordered, params["blocks"]), KEPT: kept}}


def interfering(experiment: Experiment) -> AbstractContextManager[None]:
    """Inside, a model that is traced with weights of `altered` does as they say.

    UserError for a kind of attention whose heads cannot be told apart.
    """
    here: list[Any] = []  # what is kept of the block that is being traced
    heads: list[bool] = []  # whether its heads have passed

    def interfere(call: Any, args: Any, kwargs: Any, context: nn.module.InterceptorContext) -> Any:
        module, method = context.module, context.method_name
        if isinstance(module, Block) and method == "__call__":
            here.append(module.variables["params"][KEPT])
            heads.clear()
            y_BTD, cache = call(*args, **kwargs)
            if not heads:
                kind = tag_of(type(experiment.model.attention.projection))
                raise UserError(
                    f"config.model.attention.projection: the heads of {kind} cannot be taken out one by one"
                )
            return jnp.where(here.pop()["blocks_L"] > 0, y_BTD, args[0]), cache
        if isinstance(module, Block) and method == "after":
            branch, x_BTD, added_BTD = args
            kept = here[-1][f"{branch}_L"] > 0
            if module.config.norms == "post":
                return call(branch, x_BTD, jnp.where(kept, added_BTD, 0))
            return jnp.where(kept, call(*args), x_BTD)
        if here and method == "__call__" and module.path[-2:] == ("attention", "out"):
            equation, mixed_BTNH = args
            heads.append(True)
            kept_N = here[-1]["heads_LN"].astype(mixed_BTNH.dtype)
            return call(equation, mixed_BTNH * kept_N[None, None, :, None])
        return call(*args, **kwargs)

    return nn.intercept_methods(interfere)
