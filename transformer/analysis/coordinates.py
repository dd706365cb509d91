"""The coordinate check: how far some steps of training move the parts of a model, over widths and over depths.

A parametrisation that holds over a size moves every part as far in a large model as in a small one. One that does not
shows it after a few steps at any size that fits on a laptop: arXiv:2203.03466, appendix D.1; over the depth
arXiv:2505.01618, figure 7. Models learn a few rows of random tokens by heart, without warm-up and at a constant rate.

B rows, T positions, D width.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from transformer.analysis.bench import random_batch
from transformer.config import Experiment, check
from transformer.errors import UserError
from transformer.model.masks import causal
from transformer.model.parametrisation import Completep, DepthMup, Mup
from transformer.model.transformer import Transformer
from transformer.parallel.mesh import Mesh, make_mesh
from transformer.training.schedule import Constant
from transformer.training.state import dials, fresh_state
from transformer.training.step import train_step

FLAT = 0.25  # a power of the size below which, in either direction, a part is called flat
PARTS = ("embedding", "attention", "mlp", "stream", "logits")
Say = Callable[[str], None]


def flat_by_rule(experiment: Experiment, over: str) -> tuple[str, ...]:
    """The parts that the parametrisation says are flat over ``width`` or ``depth``."""
    p = experiment.model.parametrisation
    if over == "width":
        return PARTS if isinstance(p, Mup) else ()
    if isinstance(p, Completep):
        return PARTS
    return ("embedding", "stream", "logits") if isinstance(p, DepthMup) else ()  # each branch moves less and less


def resized(experiment: Experiment, over: str, size: int) -> Experiment:
    """The experiment with another depth or width (heads keep theirs, and are more). UserError where it cannot be."""
    m = experiment.model
    if over == "width":
        if m.heads * size % m.width:
            raise UserError(
                f"--widths: {size} is not {m.width} times a whole number of {m.heads} heads; heads keep their width"
            )
        mlp = m.mlp
        if mlp.width is not None:
            mlp = dataclasses.replace(mlp, width=max(1, mlp.width * size // m.width))
        m = dataclasses.replace(m, width=size, heads=m.heads * size // m.width, head_width=m.head_size, mlp=mlp)
    else:
        m = dataclasses.replace(m, depth=size)
    train = dataclasses.replace(experiment.train, warmup=0, schedule=Constant())
    found = dataclasses.replace(experiment, model=m, train=train, mesh=Mesh())
    check(found)
    return found


def moved(experiment: Experiment, steps: int) -> dict[str, float]:
    """How far ``steps`` updates have moved each part: root mean square of the change of its output, a scalar each.

    ``attention`` and ``mlp`` are means over the blocks' branches, before the branch's factor.
    """
    model = dataclasses.replace(experiment.model, dropout=0.0, layer_drop=0.0, stack="scan")
    e = dataclasses.replace(experiment, model=model)
    with jax.set_mesh(make_mesh(e.mesh)):
        batch, state, program, given = random_batch(e), fresh_state(e), e.program, dials(e)
        before = outputs(e, state.params, batch)
        step = jax.jit(train_step, static_argnums=0, compiler_options=QUICK)
        for _ in range(steps):
            state, _ = step(program, state, batch, given)
        after = outputs(e, state.params, batch)
    change = {part: np.sqrt(np.mean(np.square(after[part] - before[part]), axis=(-1, -2, -3))) for part in PARTS}
    return {part: float(np.mean(value)) for part, value in change.items()}


QUICK: Any = {"xla_backend_optimization_level": 0}  # a few steps of small models: compiling is most of the time


def outputs(e: Experiment, params: Any, batch: Any) -> dict[str, np.ndarray]:
    """What each part gives, float64 [n, B, T, its width], n blocks or 1. Op by op, with no program to be compiled."""
    seen: dict[str, list[Any]] = {part: [] for part in PARTS}

    def watch(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
        found = call(*args, **kwargs)
        name = context.module.name
        if context.method_name == "__call__" and name in ("attention", "mlp"):
            seen[name].append(found[0] if name == "attention" else found)
        if context.method_name == "blocks":
            seen["embedding"].append(args[0])
            seen["stream"].append(found[0])
        return found

    model = Transformer(dataclasses.replace(e.model, stack="unroll"), e.vocab_size)
    mask = causal(e.model.context, batch.segments_BT)
    with nn.intercept_methods(watch):
        logits_BTV, _ = model.apply({"params": params}, batch.tokens_BT, batch.positions_BT, mask)
    seen["logits"].append(logits_BTV)
    return {part: np.asarray(jnp.stack(found), np.float64) for part, found in seen.items()}


def coordinates(
    experiment: Experiment, widths: Sequence[int], depths: Sequence[int], steps: int, say: Say
) -> dict[str, Any]:
    """For each of the two axes: how far each part moved at each size, the power of the size that this grows with (the
    slope of a line through the logarithms), whether that is flat, and whether the parametrisation's rules say so."""
    result: dict[str, Any] = {"steps": steps, "learning_rate": experiment.train.learning_rate}
    for over, sizes in (("width", widths), ("depth", depths)):
        if len(sizes) < 2:
            continue
        experiments = [resized(experiment, over, size) for size in sizes]  # all are checked before any work
        found = []
        for size, e in zip(sizes, experiments, strict=True):
            found.append(moved(e, steps))
            say(f"{over} {size}: " + ", ".join(f"{part} {value:.3g}" for part, value in found[-1].items()))
        by_rule = flat_by_rule(experiment, over)
        parts = {}
        for part in PARTS:
            values = [f[part] for f in found]
            power = slope(sizes, values)
            parts[part] = {"moved": values, "power": power, "flat": abs(power) <= FLAT, "must_be_flat": part in by_rule}
        result[over] = {"sizes": list(sizes), "parts": parts}
    if "width" not in result and "depth" not in result:
        raise UserError("--widths, --depths: give two sizes or more of at least one, such as --depths=2,8,32")
    axes = [result[over] for over in ("width", "depth") if over in result]
    result["holds"] = all(p["flat"] for axis in axes for p in axis["parts"].values() if p["must_be_flat"])
    return result


def slope(sizes: Sequence[int], values: Sequence[float]) -> float:
    """The power p of the best fit of values = c size^p, in logarithms; infinite where one is no number above 0."""
    if not all(math.isfinite(v) and v > 0 for v in values):
        return math.inf
    return float(np.polyfit(np.log(sizes), np.log(values), 1)[0])


def text(result: dict[str, Any]) -> str:
    """The result as a person reads it."""
    lines = [f"how far {result['steps']} steps at learning rate {result['learning_rate']:g} move each part (rms)"]
    for over in ("width", "depth"):
        if over not in result:
            continue
        axis = result[over]
        lines += ["", f"{over:<12}" + "".join(f"{size:>10}" for size in axis["sizes"]) + f"{'power':>9}"]
        for part, found in axis["parts"].items():
            moved = "".join(f"{value:>10.3g}" for value in found["moved"])
            verdict = "flat" if found["flat"] else ("grows" if found["power"] > 0 else "shrinks")
            wanted = ", as it must be" if found["flat"] else ", and must be flat"
            lines.append(f"{part:<12}{moved}{found['power']:>9.2f}  {verdict}{wanted if found['must_be_flat'] else ''}")
    return "\n".join(lines)
