"""Is this accelerator computing the right thing, and how fast? One run of some minutes on one device.

    python -m transformer.analysis.device_check > result.json

Every kernel that the device can run against the plain one, results and gradients; a bfloat16 training step against a
float32 one; generation with the cache against without; time and memory by context; and the speed of a training
step. JSON on standard output, lines for people on standard error; status 1 where something is wrong.
"""

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from transformer.analysis.bench import random_batch, time_generation, time_training
from transformer.analysis.contender import experiment
from transformer.analysis.machine import bandwidth, matmul_rate, peak_memory
from transformer.generation.decode import Generator, continue_prompts
from transformer.generation.sampling import Sampling
from transformer.jsons import finite
from transformer.model.kernels import KERNELS, Call, attend
from transformer.model.masks import Mask, causal
from transformer.parallel.mesh import Mesh as MeshConfig
from transformer.parallel.mesh import make_mesh
from transformer.training.state import fresh_state
from transformer.training.step import make_step

TOLERANCE = {"float32": 2e-3, "bfloat16": 3e-2}  # of the largest number: products may run in TF32 on a GPU
Say = Callable[[str], None]


def pack(rows: int, context: int) -> jax.Array:
    """Segments of three documents and some padding, int32 [B, T]."""
    ids_T = np.searchsorted([context // 5, context // 2, context - context // 16], np.arange(context), "right") + 1
    return jnp.asarray(np.tile(np.where(ids_T > 3, 0, ids_T), (rows, 1)), jnp.int32)


def kernels(context: int, say: Say) -> list[dict[str, Any]]:
    """The largest difference to plain attention in float32, relative to the largest number, by kernel and case."""
    found: list[dict[str, Any]] = []
    B, K, G, H = 2, 2, 2, 64
    for name in KERNELS:
        for dtype in TOLERANCE:
            for packed in (False, True):
                mask = causal(context, pack(B, context) if packed else None)
                call = Call(jax.default_backend(), context, context, H, dtype, ordered=True, packed=packed)
                if objection := KERNELS[name].objection(call):
                    say(f"{name}, {dtype}, {'packed' if packed else 'whole rows'}: not run: {objection}")
                    continue
                keys = jax.random.split(jax.random.key(0), 4)
                shapes = ((B, context, K, G, H), (B, context, K, H), (B, context, K, H), (B, context, K, G, H))
                exact = [jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True)]
                with jax.default_matmul_precision("highest"):
                    wanted = _four("plain", mask, *exact)
                given = _four(name, mask, *(x.astype(dtype) for x in exact))
                error = max(_far(a, b) for a, b in zip(given, wanted, strict=True))
                found.append({"kernel": name, "dtype": dtype, "packed": packed, "error": error})
                found[-1]["ok"] = error < TOLERANCE[dtype]
                say(f"{name}, {dtype}, {'packed' if packed else 'whole rows'}: {error:.1e} {_word(found[-1]['ok'])}")
    return found


def _four(name: str, mask: Mask, q: jax.Array, k: jax.Array, v: jax.Array, back: jax.Array) -> Any:
    """Result and gradients."""

    @jax.jit
    def run(q: jax.Array, k: jax.Array, v: jax.Array, back: jax.Array) -> Any:
        def loss(q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
            mixed = attend(name, q, k, v, mask)
            return (mixed * back).astype(jnp.float32).sum(), mixed

        gradients, mixed = jax.grad(loss, (0, 1, 2), has_aux=True)(q, k, v)
        return mixed, *gradients

    return run(q, k, v, back)


def _far(a: jax.Array, b: jax.Array) -> float:
    x, y = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return float(np.abs(x - y).max() / np.abs(y).max()) if np.isfinite(x).all() else float("inf")


def _word(ok: bool) -> str:
    return "right" if ok else "WRONG"


def training(size: str, say: Say) -> list[dict[str, Any]]:
    """A step in each dtype: its speed, and whether the losses of five steps agree with float32's."""
    found: list[dict[str, Any]] = []
    for dtype in TOLERANCE:
        e = experiment(size, dtype)
        state, batch = fresh_state(e), random_batch(e)
        step, losses = make_step(), []
        for _ in range(5):
            state, metrics = step(e, state, batch)
            losses.append(float(metrics.loss))
        far = max(abs(a - b) for a, b in zip(losses, found[0]["losses"] if found else losses, strict=True))
        speed = time_training(e)
        mfu = speed["flops"] / speed["seconds_per_step"] / matmul_rate(dtype)
        found.append({"size": size, "dtype": dtype, "losses": losses, "ok": far < 0.05, **speed, "mfu": mfu})
        say(f"training {size}, {dtype}: {speed['tokens_per_second']:,.0f} tokens/s, mfu {mfu:.0%}, {_word(far < 0.05)}")
    return found


def generation(size: str, say: Say) -> list[dict[str, Any]]:
    """The cached and the tutorial's way give the same tokens; tokens per second of each."""
    e = experiment(size, "float32")
    params = fresh_state(e).params
    new = min(16, e.model.context - 8)
    texts = []
    for use_cache in (True, False):
        with jax.default_matmul_precision("highest"):
            generator = Generator(e, Sampling(temperature=0.0), end_ids=(), use_cache=use_cache)
            *_, last = continue_prompts(generator, params, [[1, 2, 3], [4, 5, 6, 7, 8]], new)
        texts.append([c.ids for c in last])
    ok = texts[0] == texts[1]
    rates = {f"rows_{rows}": time_generation(e, rows, True)["tokens_per_second"] for rows in (1, 8)}
    say(f"generation {size}: {rates['rows_1']:,.0f} tokens/s at 1 row, {rates['rows_8']:,.0f} at 8, {_word(ok)}")
    return [{"size": size, "ok": ok, **rates}]


def contexts(lengths: tuple[int, ...], say: Say) -> list[dict[str, Any]]:
    """Time and planned memory of attention, forward and backward, by context and kernel."""
    found: list[dict[str, Any]] = []
    for context in lengths:
        for name in KERNELS:
            dtype = "bfloat16"
            call = Call(jax.default_backend(), context, context, 64, dtype, ordered=True, packed=False)
            if KERNELS[name].objection(call) or (name == "plain" and context > 8192):
                continue
            q, k, v = (jax.random.normal(jax.random.key(i), (1, context, 4, 64)).astype(dtype) for i in range(3))

            def loss(q: Any, k: Any, v: Any, name: str = name, context: int = context) -> Any:
                return attend(name, q[:, :, :, None], k, v, causal(context)).astype(jnp.float32).sum()

            compiled = jax.jit(jax.grad(loss, (0, 1, 2))).lower(q, k, v).compile()
            jax.block_until_ready(compiled(q, k, v))
            begun = time.perf_counter()
            jax.block_until_ready(compiled(q, k, v))
            plan = compiled.memory_analysis()
            found.append({"context": context, "kernel": name, "seconds": time.perf_counter() - begun})
            found[-1]["temporaries"] = int(plan.temp_size_in_bytes) if plan else None
            say(f"context {context}, {name}: {found[-1]['seconds'] * 1e3:,.1f} ms, {found[-1]['temporaries']} bytes")
    return found


def check(say: Say, size: str, context: int, lengths: tuple[int, ...]) -> dict[str, Any]:
    """Everything. ``ok`` is False where anything was wrong."""
    with jax.set_mesh(make_mesh(MeshConfig())):
        result: dict[str, Any] = {
            "device": jax.devices()[0].device_kind,
            "platform": jax.default_backend(),
            "jax": jax.__version__,
            "limits": {f"matmul_{d}": matmul_rate(d) for d in TOLERANCE} | {"memory_bandwidth": bandwidth()},
            "kernels": kernels(context, say),
            "training": training(size, say),
            "generation": generation(size, say),
            "contexts": contexts(lengths, say),
            "peak_memory": peak_memory(),
        }
    result["ok"] = all(row["ok"] for part in ("kernels", "training", "generation") for row in result[part])
    return result


if __name__ == "__main__":
    found = check(lambda line: print(line, file=sys.stderr, flush=True), "M", 512, (1024, 4096, 16384))
    print(json.dumps(finite(found)))
    sys.exit(0 if found["ok"] else 1)
