"""Compile a step for machines that are not here, in a process of its own: `python -m transformer.analysis.ahead FILE`.

The compiler works out the program and what lies where in memory, which takes seconds, and then writes the chips' code,
which takes minutes and tells nothing more of memory and network. So it is asked to write down what it has after the
first part, and ended there, unless the code is wanted too.
"""

import dataclasses
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from transformer.analysis.chips import Topology, topology
from transformer.config import Experiment
from transformer.errors import UserError
from transformer.model.moe import Moe
from transformer.parallel.mesh import sizes
from transformer.settings import from_dict, to_dict

# So that the compilers look for no machine, say nothing, and let another process compile as well.
QUIET = {
    "JAX_PLATFORMS": "cpu",
    "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",  # which needs a GPU's driver
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-16",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_MIN_LOG_LEVEL": "3",
    "TPU_STDERR_LOG_LEVEL": "3",
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "true",
    "JAX_ENABLE_COMPILATION_CACHE": "false",  # a program that is found there is not compiled, and writes nothing down
}
STEPS = ("train", "decode")
PARTS = {"attention": "attention", "mlp": "mlp", "unembed": "unembedding", "embed": "embedding"}  # by name in a path
_TOO_MUCH = re.compile(r"([\d.]+)([KMGT]?)\)? (?:of|exceeds available HBM) \(?([\d.]+)([KMGT]?)")
_LAST = "*after_optimizations_after_buffer_assignment.txt"  # the last that is written before the chips' code


@dataclasses.dataclass(frozen=True)
class Compiled:
    """What the compiler says of one device, in bytes, and the program's text; or that it does not fit."""

    seconds: float
    parts: dict[str, float]  # of what the step is given: parameters, moments, batch, ...
    weights: dict[str, float]  # the parameters by PARTS of the model
    products: dict[str, float]  # FLOPs of all devices' products by PARTS, from the traced program, without Pallas
    temporaries: float = 0.0
    text: str = ""
    needed: float = 0.0  # where it does not fit: what it needs, and what there is
    available: float = 0.0

    @property
    def fits(self) -> bool:
        return not self.needed


def compile_ahead(
    experiment: Experiment, topology: Topology, step: str, seconds: float = 600, code: bool = False
) -> Compiled:
    """Compile one of STEPS for ``topology``. With ``code`` to the end. UserError where it cannot be compiled."""
    assert step in STEPS
    request = {
        "experiment": to_dict(experiment),
        "topology": topology.name,
        "slices": topology.slices,
        "step": step,
    }
    with tempfile.TemporaryDirectory(prefix="plan-") as directory:
        folder = Path(directory)
        (folder / "request.json").write_text(json.dumps(request), encoding="utf-8")
        flags = f"--xla_dump_to={folder} --xla_dump_hlo_as_text --xla_dump_hlo_module_re=jit_{step}_step"
        if topology.chip.platform == "gpu":
            # Nothing can be tried out without a GPU, and Triton's products need that for some shapes.
            flags += " --xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false"
        root = str(Path(__file__).parents[2])
        path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
        env = os.environ | QUIET | {"XLA_FLAGS": flags, "PYTHONPATH": path}
        with open(folder / "stderr", "w", encoding="utf-8") as stderr:
            process = subprocess.Popen(
                [sys.executable, "-m", "transformer.analysis.ahead", str(folder / "request.json")],
                env=env,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                start_new_session=True,
            )
        try:
            start = time.monotonic()
            while process.poll() is None:
                if not code and any(folder.glob(_LAST)):
                    break
                if time.monotonic() - start > seconds:
                    raise UserError(f"--limit: compiling for {topology.name} did not end within {seconds:.0f} seconds")
                time.sleep(0.1)
            took = time.monotonic() - start
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        return _read(folder, took, topology)


def _read(folder: Path, seconds: float, topology: Topology) -> Compiled:
    failure = folder / "failure"
    error = failure.read_text(encoding="utf-8") if failure.is_file() else ""
    known = (
        json.loads((folder / "traced.json").read_text(encoding="utf-8")) if (folder / "traced.json").is_file() else {}
    )
    if known and (memory := _TOO_MUCH.search(error)):
        scale = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
        needed, available = float(memory[1]) * scale[memory[2]], float(memory[3]) * scale[memory[4]]
        return Compiled(seconds, **known, needed=needed, available=available)
    found = sorted(folder.glob("*after_optimizations-buffer-assignment.txt"))
    if error or not found:
        lines = (
            error.strip().splitlines() or (folder / "stderr").read_text("utf-8", "replace").strip().splitlines()[-1:]
        )
        raise UserError(f"cannot compile for {topology.name}: {lines[0] if lines else 'the compiler ended'}")
    text = next(folder.glob("*after_optimizations.txt")).read_text(encoding="utf-8")
    return Compiled(seconds, **known, temporaries=temporaries(found[-1].read_text(encoding="utf-8")), text=text)


def temporaries(assignment: str) -> float:
    """Bytes of temporaries in the device's main memory, from the compiler's account of its buffers."""
    found = re.findall(r"^allocation \d+: size (\d+),(?! color)[^\n]*preallocated-temp", assignment, re.MULTILINE)
    return float(sum(map(int, found)))


# In the process of its own


def main(request: Path) -> None:
    import jax

    asked = json.loads(request.read_text(encoding="utf-8"))
    folder, experiment = request.parent, from_dict(Experiment, asked["experiment"])
    try:
        from jax.experimental import topologies

        from transformer.parallel.mesh import make_mesh

        chip = topology(asked["topology"]).chip
        if chip.platform == "gpu":
            machines = f"{asked['slices']}x1x{asked['topology'].partition(':')[2]}"
            more = {"platform": "cuda", "target_config": chip.target, "topology": machines}
        else:
            more = {"platform": "tpu"} | ({"num_slices": asked["slices"]} if asked["slices"] > 1 else {})
        machine = topologies.get_topology_desc(topology_name=asked["topology"], **more)
        with jax.set_mesh(make_mesh(experiment.mesh, machine.devices)):
            traced, params, parts = _train(experiment) if asked["step"] == "train" else _decode(experiment)
            known = {
                "parts": {"parameters": _bytes(params), **parts},
                "weights": _weights(params),
                "products": products(traced.jaxpr.jaxpr, filled(experiment)),
            }
            part = folder / "traced.part"
            part.write_text(json.dumps(known), encoding="utf-8")
            part.rename(folder / "traced.json")
            traced.lower(lowering_platforms=("cuda" if chip.platform == "gpu" else "tpu",)).compile()
    except Exception as error:
        (folder / "failure").write_text(str(error) or type(error).__name__, encoding="utf-8")
        raise SystemExit(1) from error


def _bytes(tree: Any) -> float:
    """On one device."""
    import jax

    found = 0.0
    for x in jax.tree.leaves(tree):
        shape = x.sharding.shard_shape(x.shape)
        count = 1
        for length in shape:
            count *= length
        found += count * x.dtype.itemsize
    return found


def _weights(params: Any) -> dict[str, float]:
    """Bytes on one device by part of the model."""
    import jax

    found: dict[str, float] = defaultdict(float)
    for path, x in jax.tree_util.tree_leaves_with_path(params):
        found[_part(jax.tree_util.keystr(path, simple=True, separator="/"))] += _bytes(x)
    return dict(found)


def _part(path: str) -> str:
    """The part of the model that a weight or an operation with this name belongs to."""
    return next((part for name, part in PARTS.items() if re.search(rf"\b{name}", path)), "rest")


def _train(experiment: Experiment) -> tuple[Any, Any, dict[str, float]]:
    """The training step as the loop runs it, traced, its parameters, and bytes of what else it is given."""
    import jax.numpy as jnp

    from transformer.data.packing import Batch
    from transformer.parallel.rules import put
    from transformer.training.state import Dials, abstract, init_state
    from transformer.training.step import make_step

    state = abstract(lambda: init_state(experiment))
    shape = (experiment.train.batch, experiment.model.context)
    dtypes: Any = (*[jnp.int32] * 4, jnp.float32)

    def rows() -> Any:
        arrays: Any = [put(jnp.zeros(shape, dtype), "batch", "time") for dtype in dtypes]
        return Batch(*arrays)

    batch = abstract(rows)
    given = abstract(lambda: Dials(jnp.uint32(0), jnp.float32(0)))
    parts = {"optimizer": _bytes(state.opt_state), "batch": _bytes(batch)}
    step = make_step()
    return step.trace(experiment, state, batch, given), state.params, parts


def _decode(experiment: Experiment) -> tuple[Any, Any, dict[str, float]]:
    """A new token for each of as many rows as the mesh cuts rows into, with a cache of a whole context, traced."""
    import jax
    import jax.numpy as jnp

    from transformer.generation.decode import Generator, next_logits
    from transformer.generation.sampling import Sampling
    from transformer.model.transformer import empty_cache
    from transformer.parallel.rules import put, shards
    from transformer.training.state import abstract, init_params

    generator = Generator(experiment, Sampling(), ())
    rows, places = shards("batch", sizes(experiment.mesh)), experiment.model.context
    params = abstract(lambda: init_params(experiment))
    cache = abstract(lambda: empty_cache(experiment.model, rows, places))
    tokens = abstract(lambda: put(jnp.zeros((rows, places), jnp.int32), "batch", "time"))
    one = abstract(lambda: put(jnp.zeros(rows, jnp.int32), "batch"))

    def decode_step(params: Any, tokens: Any, lengths: Any, new: Any, cache: Any) -> Any:
        return next_logits(generator, params, tokens, lengths, new, lengths, cache)

    parts = {"cache": _bytes(cache), "batch": _bytes((tokens, one, one))}
    return jax.jit(decode_step, donate_argnums=4).trace(params, tokens, one, one, cache), params, parts


def filled(experiment: Experiment) -> float:
    """The share of the rows of a mixture's products that hold a token, on the mean over devices: where experts are cut,
    each device has room for all tokens of the devices that share them."""
    moe, devices = experiment.model.mlp, sizes(experiment.mesh)["expert"]
    if not isinstance(moe, Moe):
        return 1.0
    return moe.top_k / (devices * min(moe.top_k, moe.experts // devices))


def products(jaxpr: Any, filled: float = 1.0) -> dict[str, float]:
    """FLOPs of the matrix products of a traced program by part of the model, on all devices; loops count as often as
    they go round, and of ragged products the rows that are ``filled``.

    Pallas kernels are left out, of branches the costliest counts, and what nothing comes of is not compiled.
    """
    from jax.interpreters.partial_eval import dce_jaxpr

    return _products(dce_jaxpr(jaxpr, True)[0], filled, 1, "")


def _products(jaxpr: Any, filled: float, devices: int, path: str) -> dict[str, float]:
    total: dict[str, float] = defaultdict(float)
    for e in jaxpr.eqns:
        name, here = e.primitive.name, f"{path}/{e.source_info.name_stack}"
        if name == "dot_general":
            (summed, _), _ = e.params["dimension_numbers"]
            length = 1
            for dimension in summed:
                length *= e.invars[0].aval.shape[dimension]
            total[_part(here)] += 2.0 * e.outvars[0].aval.size * length * devices
        elif name.startswith("ragged_dot"):  # rows by inputs times outputs, or rows by inputs times rows by outputs
            total[_part(here)] += 2.0 * e.invars[0].aval.size * e.outvars[0].aval.shape[-1] * devices * filled
        elif name != "pallas_call":
            inside = devices
            if name == "shard_map":
                inside *= math.prod(e.params["mesh"].shape[axis] for axis in e.params["newly_manual_axes"])
            found = [_products(j, filled, inside, here) for value in e.params.values() for j in _jaxprs(value)]
            if name == "cond":
                found = [max(found, key=lambda branch: sum(branch.values()))]
            around = e.params["length"] if name == "scan" else 1
            for part, flops in (one for inner in found for one in inner.items()):
                total[part] += around * flops
    return dict(total)


def _jaxprs(value: Any) -> list[Any]:
    values = value if isinstance(value, tuple | list) else (value,)
    found = [getattr(v, "jaxpr", v) for v in values]
    return [j for j in found if hasattr(j, "eqns")]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
