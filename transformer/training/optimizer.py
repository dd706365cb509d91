"""From gradients to updates: AdamW, and Muon for the matrices. Who gets what is decided by declared roles."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from transformer.model.layers import Weight, by_declaration
from transformer.model.parametrisation import Rule, times
from transformer.settings import settings

# Weight decay is for the weights of products and tables; norm scales, biases and position vectors keep their size.
DECAYED = ("embedding", "matrix", "residual", "unembedding")
MATRICES = ("matrix", "residual")


@settings
class Adamw:
    """arXiv:1711.05101: decay apart from the gradient, multiplied by the learning rate."""

    b1: float = 0.9
    b2: float = 0.95
    epsilon: float = 1e-8


@settings
class Muon:
    """Momentum, made orthogonal by five Newton-Schulz steps, for matrices inside blocks; AdamW for the rest.

    Keller Jordan, "Muon" (2024); updates are scaled by ``rms * sqrt(max(fan in, fan out))``
    (arXiv:2502.16982, equation 4), so one learning rate serves both kinds.
    """

    momentum: float = 0.95
    rms: float = 0.2
    b1: float = 0.9
    b2: float = 0.95
    epsilon: float = 1e-8


Optimizer = Adamw | Muon


def decayed(declared: Any) -> Any:
    """True for the weights that decay, as a tree."""
    return by_declaration(lambda w: w.role in DECAYED, declared)


def make_optimizer(
    kind: Optimizer, weight_decay: float, declared: Any, rule: Callable[..., Rule] = lambda w, muon: Rule()
) -> optax.GradientTransformation:
    """A transformation that gives the *direction*: the step subtracts learning rate times it.

    All its state is float32 (or int32 counts) and laid out as the parameters are. ``rule(weight, muon=...)`` is what
    the parametrisation makes of a weight's learning rate, epsilon and decay.
    """
    adam = optax.scale_by_adam(b1=kind.b1, b2=kind.b2, eps=kind.epsilon)
    scaling = adam
    if isinstance(kind, Muon):
        labels = by_declaration(lambda w: "muon" if w.role in MATRICES else "adam", declared)
        scaling = optax.multi_transform({"muon": scale_by_muon(kind, declared), "adam": adam}, labels)
    inner = optax.chain(scaling, optax.add_decayed_weights(weight_decay, mask=decayed(declared)))
    rules = by_declaration(lambda w: rule(w, muon=isinstance(kind, Muon) and w.role in MATRICES), declared)
    return parametrised(inner, rules)


def parametrised(inner: optax.GradientTransformation, rules: Any) -> optax.GradientTransformation:
    """``inner`` with a `Rule` for each weight, by factors on what goes in and what comes out.

    An epsilon k times as large gives the direction m / (sqrt(v) + k epsilon), which is that of gradients divided by k.
    """

    def each(function: Any, *trees: Any) -> Any:
        return jax.tree.map(function, rules, *trees, is_leaf=lambda x: isinstance(x, Rule))

    def update(gradients: Any, state: Any, params: Any = None) -> Any:
        gradients = each(lambda r, g: times(g, 1 / r.epsilon), gradients)
        shrinking = each(lambda r, p: times(p, r.decay), params)  # only the decay looks at them
        directions, state = inner.update(gradients, state, shrinking)
        return each(lambda r, d: times(d, r.rate), directions), state

    return optax.GradientTransformation(inner.init, update)


def scale_by_muon(kind: Muon, declared: Any) -> optax.GradientTransformation:
    """Nesterov momentum (float32), orthogonalised as the declared inputs-by-outputs matrix of each block."""

    def init(params: Any) -> Any:
        return optax.tree.zeros_like(params)

    def update(gradients: Any, momentum: Any, params: Any = None) -> Any:
        momentum = optax.tree.update_moment(gradients, momentum, kind.momentum, 1)
        ahead = optax.tree.update_moment(gradients, momentum, kind.momentum, 1)
        return by_declaration(direction, declared, ahead), momentum

    def direction(w: Weight, ahead: Any) -> Any:
        # What AdamW sees to is masked out here (and a masked node is false, being empty).
        return ahead if isinstance(ahead, optax.MaskedNode) else orthogonal(w, ahead, kind.rms)

    return optax.GradientTransformation(init, update)


def orthogonal(w: Weight, momentum: jax.Array, rms: float) -> jax.Array:
    """The nearest (semi-)orthogonal matrix to each block's, and expert's, momentum, about; root mean square ``rms`` for
    square ones.

    Newton-Schulz multiplies a matrix with itself, which explicit sharding refuses where it is cut
    over both dimensions: it is gathered whole for the products and cut again.
    """
    count = math.prod(w.shape[: w.copies])
    fan_in = math.prod(w.shape[w.copies : w.copies + w.inputs])
    layout = jax.typeof(momentum).sharding.spec
    meshed = not jax.sharding.get_abstract_mesh().empty
    whole = jax.reshard(momentum, PartitionSpec(*(None,) * momentum.ndim)) if meshed else momentum
    matrices = whole.reshape(count, fan_in, -1)
    turned = jax.vmap(newton_schulz)(matrices) * rms * max(matrices.shape[1:]) ** 0.5
    turned = turned.reshape(w.shape)
    return jax.reshard(turned, layout) if meshed else turned


def newton_schulz(matrix: jax.Array, steps: int = 5) -> jax.Array:
    """``matrix`` with its singular values pushed to about 1 (0.7 to 1.2), by products alone.

    Each step applies the odd polynomial a s + b s^3 + c s^5 to every singular value s; Jordan's
    coefficients trade exactness for a steep slope at zero, so that five steps are enough.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if tall else matrix
    x = x / (jnp.linalg.norm(x) + 1e-8)
    for _ in range(steps):
        square = x @ x.T
        x = a * x + (b * square + c * square @ square) @ x
    return x.T if tall else x
