"""Before spending: what a configuration takes on machines that are not here, by compiling its real steps for them.

Memory and collectives are the compiler's, FLOPs and bytes our own counts of its program, and times a roofline: what the
chips' published figures would allow if nothing waited for anything. Nothing here is measured on a device.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from transformer import config
from transformer.analysis import hlo
from transformer.analysis.ahead import Compiled, compile_ahead
from transformer.analysis.chips import Topology
from transformer.analysis.cost import training_flops
from transformer.config import Experiment
from transformer.errors import UserError
from transformer.model.attention import kind, training_call
from transformer.model.fused import splash_pairs, splash_products
from transformer.model.kernels import choose
from transformer.parallel import mesh, rules
from transformer.settings import override
from transformer.tables import columns, human

Say = Callable[[str], None]
ASSUMPTIONS = (
    "every chip at its published peak for bfloat16, its memory and all links of its network at full rate in one "
    "direction, and none of the three waiting for another: no real step is faster"
)
LESS = ("none", "dots", "dots_without_batch", "full")  # of rematerialisation: what keeps more comes first


def plan(experiment: Experiment, topology: Topology, limit: float, code: bool, say: Say) -> dict[str, Any]:
    """The whole plan of one configuration. Compiling, and looking for what would fit, takes about ``limit`` seconds."""
    check_mesh(experiment, topology)
    start = time.monotonic()
    say(f"compiling the training step for {topology.devices} devices of {topology.name}")
    compiled = compile_ahead(experiment.program, topology, "train", limit, code)
    result = training(experiment, topology, compiled)
    if not result["fits"]:
        left = limit - (time.monotonic() - start)
        result["nearest"] = nearest(experiment, topology, left, say)
    say("compiling the step that generates a token")
    spread = generating(experiment)
    result["decode"] = decoding(spread, topology, compile_ahead(spread.program, topology, "decode", limit, code))
    return result


def generating(experiment: Experiment) -> Experiment:
    """For generation, which has no positions to cut: the devices of the context axis take rows."""
    by_axis = mesh.sizes(experiment.mesh)
    return override(experiment, {"mesh.data": by_axis["data"] * by_axis["context"], "mesh.context": 1})


def check_mesh(experiment: Experiment, topology: Topology) -> None:
    """UserError where the mesh is not of exactly the devices that there are."""
    by_axis = mesh.sizes(experiment.mesh)
    wanted, chip = math.prod(by_axis.values()), topology.chip
    if wanted != topology.devices:
        axes = " x ".join(f"{name}={size}" for name, size in by_axis.items())
        rest = math.prod(size for name, size in by_axis.items() if name != "fsdp")
        fits = topology.devices % rest == 0
        hint = f"--config.mesh.fsdp={topology.devices // rest}" if fits else f"a mesh of {topology.devices}"
        twice = f" ({chip.name} counts {chip.devices} devices a chip)" if chip.devices > 1 else ""
        raise UserError(
            f"config.mesh: {axes} is {wanted} devices, and {topology.name} has {topology.devices}{twice}; set {hint}"
        )
    if by_axis["slice"] not in ((1, topology.slices) if chip.platform == "gpu" else (topology.slices,)):
        raise UserError(
            f"config.mesh.slice: {by_axis['slice']}, and there are {topology.slices} slices, with a slow network "
            f"between them; set --config.mesh.slice={topology.slices}"
        )


def training(experiment: Experiment, topology: Topology, compiled: Compiled) -> dict[str, Any]:
    """What the compiled training step says, and what follows for the run."""
    train, tokens = experiment.train, experiment.train.batch * experiment.model.context
    attention = compiled.products.get("attention", 0.0) + attention_flops(experiment, topology.chip.platform)
    found = step(topology, compiled, compiled.products | {"attention": attention})
    found["flops"]["model"] = training_flops(experiment) * tokens
    if "times" in found:
        seconds = found["times"]["step"]
        found["tokens_per_second"] = tokens / seconds
        found["chip_hours"] = train.steps * seconds * topology.chips / 3600
    return {
        "topology": topology.name,
        "slices": topology.slices,
        "chips": topology.chips,
        "devices": topology.devices,
        "mesh": mesh.sizes(experiment.mesh),
        "tokens_per_step": tokens,
        "steps": train.steps,
        **found,
    }


def decoding(experiment: Experiment, topology: Topology, compiled: Compiled) -> dict[str, Any]:
    """What the compiled step that generates one token a row says."""
    rows = rules.shards("batch", mesh.sizes(experiment.mesh))
    found = step(topology, compiled, compiled.products)
    if "times" in found:
        found["tokens_per_second"] = rows / found["times"]["step"]
    return {"rows": rows, "places": experiment.model.context, **found}


def step(topology: Topology, compiled: Compiled, by_part: Mapping[str, float]) -> dict[str, Any]:
    """Of one compiled step: memory and bytes of one device, FLOPs of all, times at best."""
    chip, devices, flops = topology.chip, topology.devices, sum(by_part.values())
    memory = {**compiled.parts, "temporaries": compiled.temporaries}
    memory["peak"] = compiled.needed or sum(memory.values())
    memory["chip"] = topology.per_device(chip.available)
    found: dict[str, Any] = {
        "fits": compiled.fits and memory["peak"] <= memory["chip"],
        "nearest": None,
        "memory": memory,
        "weights": compiled.weights,
        "flops": {"step": flops, "device": flops / devices, "parts": dict(by_part)},
        "compile_seconds": compiled.seconds,
    }
    if not compiled.text:
        return found
    computations, entry = hlo.parse(compiled.text)
    moved = list(hlo.collectives(computations, entry, devices, topology.slices))
    found["bytes"] = hlo.traffic(computations, entry)
    found["collectives"] = by_kind(moved)
    times = {
        "compute": flops / devices / topology.per_device(chip.flops),
        "memory": found["bytes"] / topology.per_device(chip.bandwidth),
        "network": sum(c.times * (c.moved - c.between) for c in moved) / topology.per_device(chip.ici),
        "between_slices": sum(c.times * c.between for c in moved) / topology.per_device(chip.dcn),
    }
    found["times"] = {**times, "step": max(times.values()), "assumptions": ASSUMPTIONS}
    return found


def attention_flops(experiment: Experiment, platform: str) -> float:
    """FLOPs of a step's scores and mixed values in blocks where a Pallas kernel computes them; those of other kernels
    are counted in the traced program. Forward it runs twice with any rematerialisation."""
    m, flops = experiment.model, 0
    for i in range(m.depth):
        block = m.block(i)
        call = training_call(block, platform, ordered=mesh.sizes(experiment.mesh)["context"] == 1)
        if call is None or choose(m.attention.kernel, call)[0] != "splash":
            continue
        widths, runs = kind(block).widths(block), 1 if m.remat == "none" else 2
        assert widths is not None
        products = kind(block).tables * m.heads * splash_products(*widths, runs)
        flops += splash_pairs(m.context, call.window) * products
    return 2.0 * m.loops * experiment.train.batch * flops


def by_kind(found: list[hlo.Collective]) -> list[dict[str, Any]]:
    """Collectives of one kind together: how many a step, and the bytes that a device sends."""
    kinds: dict[tuple[str, bool], dict[str, Any]] = {}
    for c in found:
        empty: dict[str, Any] = {"kind": c.kind, "between_slices": c.across, "times": 0, "bytes": 0.0}
        row = kinds.setdefault((c.kind, c.across), empty)
        row["times"] += c.times
        row["bytes"] += c.times * c.moved
    return sorted(kinds.values(), key=lambda row: -row["bytes"])


def nearest(experiment: Experiment, topology: Topology, limit: float, say: Say) -> dict[str, Any] | None:
    """The first of ``smaller`` that fits, by compiling them one after the other; None where none does in time."""
    end = time.monotonic() + limit
    for changes in smaller(experiment):
        left = end - time.monotonic()
        if left < 1:
            return None
        words = " ".join(f"--config.{name}={value}" for name, value in changes.items())
        say(f"does not fit; trying {words}")
        try:
            changed = override(experiment, changes)
            config.check(changed, given=changes)
            compiled = compile_ahead(changed.program, topology, "train", left)
        except UserError:
            continue
        found = training(changed, topology, compiled)
        if found["fits"]:
            return {"changes": changes, "flags": words, "memory": found["memory"], "times": found["times"]}
    return None


def smaller(experiment: Experiment) -> Iterator[dict[str, Any]]:
    """Changes that need less memory, the smallest ones first: more is computed again, then a batch is worked through
    in more parts, then the weights are cut over more devices."""
    e, by_axis = experiment, mesh.sizes(experiment.mesh)
    for name in LESS[LESS.index(e.model.remat) + 1 :]:
        yield {"model.remat": name}
    least: dict[str, Any] = {} if e.model.remat == "full" else {"model.remat": "full"}
    rows = e.train.batch // e.train.accumulate // rules.shards("batch", by_axis)
    parts = [n for n in range(2, rows + 1) if rows % n == 0 and (n & (n - 1) == 0 or n == rows)]
    for n in parts:
        yield least | {"train.accumulate": e.train.accumulate * n}
    if by_axis["data"] > 1:
        least |= {"mesh.data": 1, "mesh.fsdp": by_axis["data"] * by_axis["fsdp"]}
        yield dict(least)
        for n in parts:
            yield least | {"train.accumulate": e.train.accumulate * n}


def study(arms: Mapping[str, Experiment], topology: Topology, limit: float, code: bool, say: Say) -> dict[str, Any]:
    """A plan of each arm's training, by name. Arms of one program are compiled once."""
    compiled: dict[Experiment, Compiled] = {}
    for name, e in arms.items():
        check_mesh(e, topology)
        if e.program not in compiled:
            say(f"{name}: compiling")
            compiled[e.program] = compile_ahead(e.program, topology, "train", limit, code)
        else:
            say(f"{name}: the same program as an arm before")
    return {name: training(e, topology, compiled[e.program]) for name, e in arms.items()}


# For people


def seconds(value: float) -> str:
    return f"{value * 1e3:.3g} ms" if value < 1 else f"{value:.3g} s"


def text(result: dict[str, Any]) -> str:
    """The plan as a person reads it."""
    mesh_words = " x ".join(f"{name}={size}" for name, size in result["mesh"].items() if size > 1) or "one device"
    lines = [
        f"{result['topology']}, {result['chips']} chips in {result['slices']} slice(s), {result['devices']} devices, "
        f"{mesh_words}; {result['tokens_per_step']:,} tokens a step, {result['steps']:,} steps",
        "",
        *_step("training", result),
    ]
    if result["fits"]:
        lines += [
            f"at best {result['tokens_per_second']:,.0f} tokens per second, {result['chip_hours']:,.1f} chip-hours "
            f"for the run",
        ]
    elif result["nearest"]:
        peak = human(result["nearest"]["memory"]["peak"])
        lines += [f"would fit, with {peak}: {result['nearest']['flags']}"]
    else:
        lines += ["nothing that was tried within --limit fits"]
    decode = result["decode"]
    lines += ["", *_step(f"generating, {decode['rows']} rows with {decode['places']} places", decode)]
    if "times" in decode:
        lines.append(f"at best {decode['tokens_per_second']:,.0f} tokens per second")
    return "\n".join([*lines, "", f"Times assume {ASSUMPTIONS}."])


def _step(title: str, found: dict[str, Any]) -> list[str]:
    memory = dict(found["memory"])
    peak, chip = memory.pop("peak"), memory.pop("chip")
    verdict = "fits" if found["fits"] else "DOES NOT FIT"
    if not memory["temporaries"]:  # of a program that does not fit the compiler says the sum alone
        del memory["temporaries"]
    lines = [f"{title}: {verdict}, {human(peak)} of {human(chip)} on each device"]
    lines.append("  memory: " + ", ".join(f"{name} {human(size)}" for name, size in memory.items()))
    lines.append("  parameters: " + ", ".join(f"{name} {human(size)}" for name, size in found["weights"].items()))
    flops = found["flops"]
    model = f", {flops['model'] / flops['step']:.0%} of it the model's own" if "model" in flops else ""
    lines.append(f"  FLOPs: {flops['step']:.4g} a step, {flops['device']:.4g} on each device{model}")
    lines.append("    " + ", ".join(f"{name} {part / flops['step']:.0%}" for name, part in flops["parts"].items()))
    if "times" not in found:
        return lines
    lines.append(f"  bytes read and written: {human(found['bytes'])}")
    rows = [("  collective", "a step", "sent by each device", "")]
    for c in found["collectives"]:
        where = "between slices" if c["between_slices"] else ""
        rows.append((f"  {c['kind']}", str(c["times"]), human(c["bytes"]), where))
    times = found["times"]
    names = [name for name in ("compute", "memory", "network", "between_slices") if times[name] or name == "compute"]
    lines += columns(rows) if len(rows) > 1 else []
    lines.append("  times: " + ", ".join(f"{name.replace('_', ' ')} {seconds(times[name])}" for name in names))
    return lines


def study_text(results: dict[str, Any]) -> str:
    """One row for each arm."""
    names = "arm, fits, on each device, temporaries, FLOPs of attention, of the MLP, step at best, tokens per second, "
    rows = [tuple(f"{names}chip-hours a run".split(", "))]
    for name, r in results.items():
        known = "times" in r
        rows.append(
            (
                name,
                "yes" if r["fits"] else "NO",
                f"{human(r['memory']['peak'])} of {human(r['memory']['chip'])}",
                human(r["memory"]["temporaries"]) if known else "-",
                *(f"{r['flops']['parts'].get(part, 0.0):.3g}" for part in ("attention", "mlp")),
                seconds(r["times"]["step"]) if known else "-",
                f"{r['tokens_per_second']:,.0f}" if known else "-",
                f"{r['chip_hours']:,.2f}" if known else "-",
            )
        )
    return "\n".join([*columns(rows), "", f"Times assume {ASSUMPTIONS}."])
