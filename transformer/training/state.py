"""What a training step reads and writes: nothing but this is carried from step to step."""

import functools
import zlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from transformer.config import Experiment
from transformer.model import parametrisation
from transformer.model.masks import causal
from transformer.model.transformer import Transformer
from transformer.parallel import rules
from transformer.training.optimizer import make_optimizer


class Dials(NamedTuple):
    """What runs of one compiled program may differ in, given to it while it runs. Scalars, or one for each lane."""

    seed: Any  # uint32, of the initial weights and of dropout
    learning_rate: Any  # float32, the peak of the schedule


def dials(experiment: Experiment) -> Dials:
    """Those of an experiment, in this machine's memory."""
    return Dials(np.uint32(experiment.train.seed), np.float32(experiment.train.learning_rate))


class State(NamedTuple):
    """Random keys are not here: they are derived from (seed, name, step)."""

    step: jax.Array  # int32, steps begun; a skipped one keeps its place in data and schedule
    skipped: jax.Array  # int32, steps whose update was not applied
    params: Any
    opt_state: Any


def key(seed: Any, name: str, step: jax.Array | int = 0) -> jax.Array:
    """A random key for one purpose at one step."""
    named = jax.random.fold_in(jax.random.key(seed), zlib.crc32(name.encode()))
    return jax.random.fold_in(named, step)


def init_params(experiment: Experiment, seed: Any = None, everything: bool = False) -> Any:
    """Initial weights as a tree, from ``seed`` (None: ``train.seed``); with ``everything`` also their declarations."""
    seed = experiment.train.seed if seed is None else seed
    model = Transformer(experiment.model, experiment.vocab_size)
    rows, columns = rules.shards("batch"), rules.shards("time")
    columns = 2 * columns if columns > 1 else 1
    index = rules.put(jnp.zeros((rows, columns), jnp.int32), "batch", "time")
    variables = model.init(key(seed, "params"), index, index, causal(columns))
    return variables if everything else variables["params"]


@functools.cache
def declarations(experiment: Experiment) -> Any:
    """Every weight's declaration, in the tree of the parameters. Nothing is computed."""
    return jax.eval_shape(lambda: init_params(experiment, everything=True))["declarations"]


def optimizer(experiment: Experiment) -> Any:
    train, rule = experiment.train, functools.partial(parametrisation.rule, experiment.model)
    return make_optimizer(train.optimizer, train.weight_decay, declarations(experiment), rule)


# Weights are drawn once: a compiler that hurries takes a third of the time and gives as fast a program (docs/log.md).
HURRIED: Any = {"xla_backend_optimization_level": 1}


def fresh_state(experiment: Experiment) -> State:
    """``init_state``, compiled once for all seeds."""
    state: State = _draw(experiment.program, dials(experiment).seed)
    return state


def init_state(experiment: Experiment, seed: Any = None) -> State:
    """The state before the first step."""
    params = init_params(experiment, seed)
    zero = jnp.zeros((), jnp.int32)
    return State(step=zero, skipped=zero, params=params, opt_state=optimizer(experiment).init(params))


_draw = jax.jit(init_state, static_argnums=0, compiler_options=HURRIED)


def abstract(make: Any) -> Any:
    """Shapes, dtypes and layouts of what ``make`` would return, on the mesh that is set."""
    mesh = jax.sharding.get_mesh()

    def concrete(x: Any) -> jax.ShapeDtypeStruct:
        layout = x.sharding.spec if x.sharding is not None else PartitionSpec()  # scalars have none
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, layout))

    return jax.tree.map(concrete, jax.eval_shape(make))
