"""Speed and memory of a configuration on this installation, each beside the limit that holds for it.

The limits are measured in the same run: a large matrix product for what computes, a sum over a large
array for what reads memory. Text is random ids: speed does not depend on what they say.
"""

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from transformer.analysis.cost import count_parameters, training_flops
from transformer.analysis.machine import bandwidth, matmul_rate, peak_memory
from transformer.config import Experiment
from transformer.data.loader import Batch, Loader
from transformer.data.store import TokenStore, Writer
from transformer.generation.decode import Generator, continue_prompts
from transformer.generation.sampling import Sampling
from transformer.parallel.rows import place
from transformer.training.state import dials, fresh_state
from transformer.training.step import make_step

ROUNDS = 7  # of each measurement; the median is what counts
STORE_PIECES, PIECE_TOKENS = 2000, 1000


def bench(experiment: Experiment, say: Callable[[str], None]) -> dict[str, Any]:
    """Measure everything; rates per second, times in seconds, memory in bytes."""
    say("measuring the machine")
    dtype = experiment.model.dtype
    limits = {"matmul_flops": matmul_rate(dtype)}
    say("measuring the loader")
    loading = time_loader(experiment)
    say("compiling and measuring the training step")
    training = time_training(experiment)
    rate = training["flops"] / training["seconds_per_step"]
    training |= {"mfu": rate / limits["matmul_flops"] / jax.sharding.get_mesh().size}
    loading["share_of_step"] = loading["seconds_per_batch"] / training["seconds_per_step"]
    generation: dict[str, Any] = {}
    for rows in (1, 8):
        for use_cache in (True, False):
            say(f"measuring generation, {rows} rows, {'with' if use_cache else 'without'} the cache")
            name = f"rows_{rows}_{'cache' if use_cache else 'no_cache'}"
            generation[name] = time_generation(experiment, rows, use_cache)
    peak = peak_memory()  # before the array that the bandwidth is measured with
    limits["memory_bandwidth"] = bandwidth()
    counts = count_parameters(experiment)
    looked_up = counts["positions"] + (0 if experiment.model.tie_embeddings else counts["embedding"])
    floor = (counts["total"] - looked_up) * 4 / limits["memory_bandwidth"]  # a lookup reads one row
    generation["bandwidth_floor_tokens_per_second_1_row"] = 1 / floor
    generation["rows_1_cache_share_of_floor"] = generation["rows_1_cache"]["tokens_per_second"] * floor
    return {
        "device": jax.devices()[0].device_kind,
        "limits": limits,
        "training": training,
        "loader": loading,
        "generation": generation,
        "peak_memory": peak,
    }


def time_loader(experiment: Experiment) -> dict[str, float]:
    """Median seconds to make one batch, in the thread that would make it ahead of the step."""
    random = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "tokens"
        with Writer(path, experiment.vocab_size, "bench") as writer:
            for number in range(STORE_PIECES):
                ids = random.integers(0, experiment.vocab_size, PIECE_TOKENS)
                writer.add(ids, PIECE_TOKENS * 3, number, True)
        loader = Loader([TokenStore(path)], (), 0, experiment.train.batch, experiment.model.context)
        loader.batch_at(0)
        return {"seconds_per_batch": _median(lambda: [loader.batch_at(i) for i in range(10)]) / 10}


def random_batch(experiment: Experiment) -> Batch:
    """Rows of random ids, each one document, on the devices of the mesh that is set."""
    context = experiment.model.context
    shape = (experiment.train.batch, context)
    ids = np.random.default_rng(0).integers(0, experiment.vocab_size, shape, dtype=np.int32)
    index = np.tile(np.arange(context, dtype=np.int32), (shape[0], 1))
    return place(Batch(ids, ids, np.ones_like(ids), index, np.ones(shape, np.float32)))


def time_training(experiment: Experiment) -> dict[str, float]:
    """Median seconds of a step after the first, which compiles."""
    train, context = experiment.train, experiment.model.context
    batch = random_batch(experiment)
    state, program, given = fresh_state(experiment), experiment.program, dials(experiment)
    step = make_step()
    start = time.perf_counter()
    state, _ = jax.block_until_ready(step(program, state, batch, given))
    first = time.perf_counter() - start

    def once() -> None:
        nonlocal state
        state, _ = jax.block_until_ready(step(program, state, batch, given))

    seconds = _median(once)
    tokens = train.batch * context
    return {
        "first_step_seconds": first,
        "seconds_per_step": seconds,
        "tokens_per_second": tokens / seconds,
        "flops": tokens * training_flops(experiment),
    }


def time_generation(experiment: Experiment, rows: int, use_cache: bool) -> dict[str, float]:
    """Median tokens per second of greedy continuation of prompts of an eighth of the context to its end."""
    params = fresh_state(experiment).params
    context = experiment.model.context
    prompt = [1] * max(1, context // 8)
    # No id is the end here, so that every row runs to its limit.
    generator = Generator(experiment, Sampling(temperature=0.0), end_ids=(), use_cache=use_cache)
    new = context - len(prompt)

    def once() -> None:
        for _ in continue_prompts(generator, params, [prompt] * rows, new):
            pass

    once()
    seconds = _median(once, rounds=3)
    return {"tokens_per_second": rows * new / seconds, "seconds": seconds}


def _median(work: Callable[[], Any], rounds: int = ROUNDS) -> float:
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return sorted(times)[len(times) // 2]


def text(result: dict[str, Any]) -> str:
    """The result as a person reads it."""
    limits, training, generation = result["limits"], result["training"], result["generation"]
    lines = [
        f"{result['device']}: {limits['matmul_flops'] / 1e9:,.0f} GFLOP/s in a matrix product, "
        f"{limits['memory_bandwidth'] / 1e9:,.1f} GB/s from memory",
        f"training: {training['seconds_per_step'] * 1e3:,.0f} ms a step, "
        f"{training['tokens_per_second']:,.0f} tokens/s, {training['mfu']:.0%} of the matrix-product rate; "
        f"first step with compiling {training['first_step_seconds']:.1f} s",
        f"loader: {result['loader']['seconds_per_batch'] * 1e3:.2f} ms a batch, "
        f"{result['loader']['share_of_step']:.1%} of a step, in another thread",
    ]
    for name, found in generation.items():
        if isinstance(found, dict):
            lines.append(f"generation, {name.replace('_', ' ')}: {found['tokens_per_second']:,.0f} tokens/s")
    lines += [
        f"  reading every weight once a token allows {generation['bandwidth_floor_tokens_per_second_1_row']:,.0f} "
        f"tokens/s at 1 row; reached: {generation['rows_1_cache_share_of_floor']:.0%}",
        f"peak memory: {result['peak_memory'] / 2**20:,.0f} MiB",
    ]
    return "\n".join(lines)
