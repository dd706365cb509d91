"""One training step: a pure function of the state and a batch.

B rows, T positions, A parts of a batch.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from transformer.config import Experiment
from transformer.model.masks import causal
from transformer.model.moe import Moe
from transformer.model.transformer import Transformer
from transformer.parallel.mesh import platform
from transformer.parallel.rules import put
from transformer.training.loss import Penalties, Sums, balanced, sums_in_parts
from transformer.training.schedule import learning_rate
from transformer.training.state import Dials, State, dials, key, optimizer


class Metrics(NamedTuple):
    """Of one step, each a scalar. Means are over the step's target tokens."""

    loss: jax.Array  # nats per token, cross-entropy alone
    accuracy: jax.Array
    tokens: jax.Array  # target tokens trained
    learning_rate: jax.Array
    grad_norm: jax.Array  # of the whole gradient, before clipping
    skipped: jax.Array  # steps skipped so far
    balance: jax.Array | None = None  # of a mixture of experts: the load-balancing loss, mean of its blocks; 1 is even
    busiest: jax.Array | None = None  # and of all its experts' loads the largest, in means of its block's


def train_step(experiment: Experiment, state: State, batch: Any, given: Dials | None = None) -> tuple[State, Metrics]:
    """The state after one update on ``batch`` (a data.loader.Batch), and what was measured.

    ``given`` stands for the experiment's own seed and learning rate: with it one program, compiled for
    ``experiment.program``, serves all runs that differ in nothing else.

    Where the loss or the gradient is not finite, or no target has weight, parameters and moments
    stay as they were, bit for bit, and the step is counted as skipped.
    """
    train, given = experiment.train, given or dials(experiment)
    sums, gradients = sum_gradients(experiment, state, batch, given.seed)
    tokens = jnp.maximum(sums.tokens, 1.0)
    gradients = jax.tree.map(lambda g: g / tokens, gradients)
    norm = optax.tree.norm(gradients)
    if train.clip is not None:
        factor = jnp.minimum(1.0, train.clip / jnp.maximum(norm, 1e-12))
        gradients = jax.tree.map(lambda g: g * factor, gradients)

    rate = learning_rate(train.schedule, given.learning_rate, train.warmup, train.steps, state.step)
    directions, opt_state = optimizer(experiment).update(gradients, state.opt_state, state.params)
    params = jax.tree.map(lambda p, d: p - rate * d, state.params, directions)

    good = jnp.isfinite(sums.objective) & jnp.isfinite(norm) & (sums.tokens > 0)
    params, opt_state = jax.tree.map(
        lambda new, old: jnp.where(good, new, old), (params, opt_state), (state.params, state.opt_state)
    )
    new = State(step=state.step + 1, skipped=state.skipped + jnp.int32(~good), params=params, opt_state=opt_state)
    metrics = Metrics(
        loss=sums.loss / tokens,
        accuracy=sums.correct / tokens,
        tokens=sums.tokens,
        learning_rate=rate,
        grad_norm=norm,
        skipped=new.skipped,
    )
    if sums.routing is not None:
        chosen_LE = sums.routing.chosen_E
        busiest = (chosen_LE / jnp.maximum(chosen_LE.mean(-1, keepdims=True), 1.0)).max()
        metrics = metrics._replace(balance=sums.routing.uneven.mean() / tokens, busiest=busiest)
    return new, metrics


def make_step() -> Any:
    """``train_step`` as all loops run it: compiled for each experiment, and the state that it is given is given up."""
    # The last level of LLVM's work takes a tenth of a CPU's compile time, and no step is faster for it (docs/log.md).
    hurried = platform() == "cpu" and not jax.config.read("jax_disable_most_optimizations")  # which is less than that
    options: Any = {"xla_backend_optimization_level": 2} if hurried else None
    return jax.jit(train_step, static_argnums=0, donate_argnums=1, compiler_options=options)


def sum_gradients(experiment: Experiment, state: State, batch: Any, seed: Any = None) -> tuple[Sums, Any]:
    """Loss sums of the whole batch, and the gradient of the summed objective, float32.

    With ``train.accumulate`` the batch is worked through in parts and the sums are added up: the
    division by the token count comes later, once, so parts with few tokens weigh little. ``seed`` is that of
    dropout (None: ``train.seed``).
    """
    seed = experiment.train.seed if seed is None else seed
    if experiment.train.accumulate == 1:
        return part_gradients(experiment, state, batch, 0, seed)
    whole = functools.partial(sum_parts, experiment)
    if jax.sharding.get_abstract_mesh().shape.get("slice", 1) == 1:
        return whole(state, batch, seed)

    def of_slice(*given: Any) -> tuple[Sums, Any]:
        found: tuple[Sums, Any] = jax.lax.psum(whole(*given), "slice")
        return found

    # Each slice adds up its own parts, so that gradients cross the slow network once.
    specs: Any = {"in_specs": (PartitionSpec(), PartitionSpec("slice"), PartitionSpec()), "out_specs": PartitionSpec()}
    found: tuple[Sums, Any] = jax.shard_map(of_slice, **specs, axis_names={"slice"}, check_vma=False)(
        state, batch, seed
    )
    return found


def sum_parts(experiment: Experiment, state: State, batch: Any, seed: Any) -> tuple[Sums, Any]:
    """``sum_gradients`` part by part."""
    total: Any = None
    parts = experiment.train.accumulate
    for i in range(parts):
        # Row r goes to part r % A: on a mesh every device keeps its own rows.
        part = jax.tree.map(lambda x: put(x.reshape(-1, parts, x.shape[-1])[:, i], "batch", "time"), batch)  # noqa: B023
        sums = part_gradients(experiment, state, part, i, seed)
        total = sums if total is None else jax.tree.map(jnp.add, total, sums)
    return total


def part_gradients(experiment: Experiment, state: State, batch: Any, part: int, seed: Any) -> tuple[Sums, Any]:
    """``sum_gradients`` of one part of a batch."""
    train, model_config = experiment.train, experiment.model
    model = Transformer(model_config, experiment.vocab_size, train=True)
    drop = jax.random.fold_in(key(seed, "dropout", state.step), part)
    mask = causal(model_config.context, batch.segments_BT)

    def loss(x_BTD: jax.Array, unembedding_VD: jax.Array) -> Sums:
        kinds = Penalties(train.z_loss, train.label_smoothing, model_config.logits_soft_cap)
        return sums_in_parts(kinds, x_BTD, unembedding_VD, batch.targets_BT, batch.weights_BT)

    def objective(params: Any) -> tuple[jax.Array, Sums]:
        given = {"params": params}, batch.tokens_BT, batch.positions_BT, mask
        how: Any = {"rngs": {"dropout": drop}, "mutable": ["routing"], "head": loss}
        (sums, _), told = model.apply(*given, counted_BT=batch.weights_BT, **how)
        if isinstance(model_config.mlp, Moe):
            sums = balanced(model_config.mlp, sums, told["routing"]["blocks"])
        return sums.objective, sums

    gradients, sums = jax.grad(objective, has_aux=True)(state.params)
    return sums, gradients
