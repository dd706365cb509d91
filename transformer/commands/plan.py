"""plan: compile for machines you do not have: memory, FLOPs, network, times at best, fits or not."""

import importlib.util
import os
from pathlib import Path
from typing import Any

from absl import flags

from transformer.cli import Args, Command, define_config, say
from transformer.errors import UserError

CUDA = ("jax_cuda12_plugin", "jax_cuda13_plugin")  # either compiles for GPUs, which need not be here


def define(values: flags.FlagValues) -> None:
    define_config(values)
    flags.DEFINE_string(
        "topology",
        None,
        "the slice: v5e:16x16, v6e:4x4, v4:4x4x4, v5p:..., tpu7x:...; or a machine of GPUs: h100:8, h200:..., a100:...",
        flag_values=values,
    )
    flags.DEFINE_integer("slices", 1, "how many such slices, or machines", flag_values=values)
    flags.DEFINE_integer("limit", 600, "seconds for compiling, and for finding what would fit", flag_values=values)
    flags.DEFINE_bool("code", False, "also write the chips' code, which takes minutes more", flag_values=values)


def run(args: Args) -> tuple[dict[str, Any], str]:
    f = args.flags
    from transformer.analysis.ahead import QUIET
    from transformer.analysis.chips import topology

    if not f.topology:
        raise UserError("--topology=KIND:SIZES is missing, for example --topology=v5e:16x16")
    found = topology(f.topology, f.slices)
    if found.chip.platform == "tpu" and importlib.util.find_spec("libtpu") is None:
        raise UserError(
            "plan: libtpu, the TPUs' compiler, is not installed; install the extra: pip install -e '.[plan]'"
        )
    if found.chip.platform == "gpu" and not any(map(importlib.util.find_spec, CUDA)):
        raise UserError("plan: JAX's CUDA plugin is not installed; install the extra: pip install -e '.[cuda]'")
    os.environ.update(QUIET)  # before JAX is imported, which would look for a TPU here
    from transformer.analysis import plan
    from transformer.config import call_file
    from transformer.study.study import Study, load

    if f.config and isinstance(call_file(f.config, "get_study", "get_config"), Study):
        from transformer.study.runner import Runner
        from transformer.study.study import resolve

        asked = load(f.config, args.changes)
        arms = resolve(asked, Runner(asked, Path(), args.cache, args.argv, say).bytes_per_row)
        results = plan.study({arm.name: arm.experiment for arm in arms}, found, f.limit, f.code, say)
        return {"arms": results, "fits": all(r["fits"] for r in results.values())}, plan.study_text(results)
    result = plan.plan(args.experiment(), found, f.limit, f.code, say)
    return result, plan.text(result)


COMMAND = Command(
    summary="compile for machines you do not have: memory, FLOPs, network, times at best, fits or not",
    example="python -m transformer plan --config=experiments/plan_reference.py --topology=v5e:16x16",
    define=define,
    run=run,
)
