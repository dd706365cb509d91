"""plan: reading compiled programs, counting FLOPs, and the whole command for a TPU that is not here."""

import dataclasses
import importlib.util
import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import small
from tests.runs.whole import ROOT
from transformer import config
from transformer.analysis import ahead, hlo, plan
from transformer.analysis.chips import CHIPS, topology
from transformer.analysis.cost import forward_flops
from transformer.config import Experiment
from transformer.data.tokenizer import Bpe, Bytes
from transformer.errors import UserError
from transformer.model.config import Model
from transformer.model.spans import Sliding
from transformer.parallel.mesh import Mesh
from transformer.settings import override, to_dict
from transformer.training.config import Train
from transformer.training.step import train_step

needs_libtpu = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")

# A loop of 12 in a loop of 3; a gather written in two parts of one channel; what custom calls spill over lines.
PROGRAM = """HloModule jit_step, is_scheduled=true

%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}

%begin (p: bf16[8,128]) -> bf16[2048,128] {
  %p = bf16[8,128]{1,0:T(8,128)(2,1)} parameter(0)
  ROOT %all-gather.1 = bf16[2048,128]{1,0:T(8,128)(2,1)S(1)} all-gather(%p), channel_id=7, replica_groups=mesh['axis_0'=256] {'axis_0'}, dimensions={0}
}

%go_on (q: bf16[8,128]) -> bf16[2048,128] {
  %q = bf16[8,128]{1,0} parameter(0)
  ROOT %all-gather.2 = bf16[2048,128]{1,0} all-gather(%q), channel_id=7, replica_groups=mesh['axis_0'=256] {'axis_0'}, dimensions={0}
}

%all-reduce-scatter.3 (g: f32[2048,128]) -> f32[8,128] {
  %g = f32[2048,128]{1,0} parameter(0)
  %all-reduce.9 = f32[2048,128]{1,0} all-reduce(%g), channel_id=9, replica_groups=[16,16]<=[256], to_apply=%add
  ROOT %cut = f32[8,128]{1,0} slice(%all-reduce.9), slice={[0:8], [0:128]}
}

%inner_condition (c: (s32[], bf16[8,128])) -> pred[] {
  %c = (s32[], bf16[8,128]) parameter(0)
  %limit.clone = s32[]{:T(128)} constant(12), metadata={op_name="cond"}
  %at = s32[] get-tuple-element(%c), index=0
  ROOT %lt = pred[] compare(%at, %limit.clone), direction=LT
}

%inner (b: (s32[], bf16[8,128])) -> (s32[], bf16[8,128]) {
  %b = (s32[], bf16[8,128]) parameter(0)
  %shard = bf16[8,128]{1,0} get-tuple-element(%b), index=1
  %kernel = bf16[8,128]{1,0} custom-call(%shard), custom_call_target="tpu_custom_call", backend_config={
"block": 512
}}, metadata={op_name="kernel"}
  %started = bf16[2048,128]{1,0} fusion(%kernel), kind=kCustom, calls=%begin
  %ended = bf16[2048,128]{1,0} fusion(%kernel), kind=kCustom, calls=%go_on
  ROOT %r = (s32[], bf16[8,128]) tuple(%at, %shard)
}

%outer (b: (s32[], bf16[8,128])) -> (s32[], bf16[8,128]) {
  %b2 = (s32[], bf16[8,128]) parameter(0)
  ROOT %w = (s32[], bf16[8,128]) while(%b2), condition=%inner_condition, body=%inner
}

%outer_condition (c: (s32[], bf16[8,128])) -> pred[] {
  ROOT %whatever = pred[] parameter(0)
}

ENTRY %main (a: bf16[8,128], g: f32[2048,128]) -> f32[8,128] {
  %a = bf16[8,128]{1,0} parameter(0)
  %g2 = f32[2048,128]{1,0} parameter(1)
  %loop = (s32[], bf16[8,128]) while(%a), condition=%outer_condition, body=%outer, backend_config={"known_trip_count":{"n":"3"}}
  %all-to-all.1 = f32[8,128]{1,0} all-to-all(%a), channel_id=4, replica_groups={{0,1},{2,3}}
  ROOT %out = f32[8,128]{1,0} fusion(%g2), kind=kCustom, calls=%all-reduce-scatter.3
}
"""  # noqa: E501


def test_collectives_count_as_often_as_their_loops_go_round():
    """By hand: 3 x 12 gathers of 2048 x 128 bfloat16 over 256; a reduce-scatter over 16; an exchange between two."""
    written = list(hlo.collectives(*hlo.parse(PROGRAM), 256))
    found = {c.kind: c for c in written}
    assert len(written) == 3 and set(found) == {"all-gather", "reduce-scatter", "all-to-all"}
    gather, scatter, exchange = (found[kind] for kind in ("all-gather", "reduce-scatter", "all-to-all"))
    assert (gather.times, gather.size, gather.devices) == (36, 2048 * 128 * 2, 256)
    assert gather.moved == gather.size * 255 / 256
    assert (scatter.times, scatter.size, scatter.devices) == (1, 2048 * 128 * 4, 16)
    assert (exchange.times, exchange.devices) == (1, 2)


def test_a_collective_is_between_slices_where_a_group_has_devices_of_two():
    """256 devices: in groups of 16 that follow one another none crosses 2 slices; the group of all does."""
    found = {c.kind: c.slices for c in hlo.collectives(*hlo.parse(PROGRAM), 256, slices=2)}
    assert found["all-gather"] == 2 and found["reduce-scatter"] == 1


@pytest.mark.parametrize(
    ("written", "wanted"),
    [
        ("replica_groups={{0,2},{1,3}}, x", [[0, 2], [1, 3]]),
        ("replica_groups=[2,2]<=[4], x", [[0, 1], [2, 3]]),
        ("replica_groups=[2,2]<=[2,2]T(1,0), x", [[0, 2], [1, 3]]),
        ("replica_groups=mesh['data'=2,'fsdp'=2] {'data'}, x", [[0, 2], [1, 3]]),
        ("replica_groups=mesh['data'=2,'fsdp'=2] {'data','fsdp'}, x", [[0, 1, 2, 3]]),
        ("source_target_pairs={{0,1},{1,0}}, x", [[0, 1], [1, 0]]),
        ("replica_groups={}, x", [[0, 1, 2, 3]]),
        ("replica_groups=mesh['a'=2,'b'=2], device_ids=([2,2]T(1,0)) {'a'}, x", [[0, 1], [2, 3]]),
    ],
)
def test_groups_are_read_from_any_way_of_writing_them(written, wanted):
    np.testing.assert_array_equal(hlo.groups(written, 4), wanted)


def test_memory_traffic_leaves_out_what_stays_on_the_chip():
    """By hand: of the two fusions in the loop, of the custom call, of the exchange and of the last fusion."""
    shard, whole, piece = 8 * 128 * 2, 2048 * 128 * 2, 8 * 128 * 4
    loop = 36 * (2 * shard + 2 * (shard + whole) + 1)  # and one byte of the comparison
    conditions = 36 * 4  # which reads its limit
    ends = (shard + piece) + (2 * whole + piece)
    assert hlo.traffic(*hlo.parse(PROGRAM)) == pytest.approx(loop + conditions + ends, rel=1e-3)
    assert hlo.size("(bf16[8,128]{1,0:S(1)}, f32[2]{0})", memory_only=True) == 8


@pytest.mark.parametrize("remat", ["none", "full"])
@pytest.mark.parametrize("stack", ["scan", "unroll"])
def test_flops_of_the_traced_step_are_those_of_the_formula(remat, stack):
    """With the plain kernel every product is in the program: three times forward, and the blocks' once more.

    All but the last product of a block: only the next block needs it, and that block's input is kept.
    """
    e = small.experiment(depth=3, stack=stack, remat=remat)
    state, batch = jax.eval_shape(lambda: small.state(e)), small.batch(e)
    counted = sum(ahead.products(jax.make_jaxpr(lambda s, b: train_step(e, s, b))(state, batch).jaxpr).values())
    forward = forward_flops(e)
    last = 2 * 3 * e.model.width * 4 * e.model.width
    again = forward["blocks"] + forward["attention_tables"] - last if remat == "full" else 0
    tokens = e.train.batch * e.model.context
    assert counted == pytest.approx((3 * sum(forward.values()) + again) * tokens, rel=0.02)


def test_products_inside_a_shard_map_are_each_device_s():
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,), devices=jax.devices()[:4])
    spec = jax.sharding.PartitionSpec("x")
    with jax.set_mesh(mesh):
        f = jax.shard_map(lambda a: a @ jnp.ones((8, 5)), in_specs=spec, out_specs=spec)
        jaxpr = jax.make_jaxpr(f)(jax.ShapeDtypeStruct((16, 8), jnp.float32, sharding=jax.NamedSharding(mesh, spec)))
    assert ahead.products(jaxpr.jaxpr) == {"rest": 2 * 16 * 8 * 5}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("v6:4x4", r"'v6' is not a kind of chip that is known \(did you mean 'v6e'\?\)"),
        ("v5e", "has no sizes; write them as in v5e:4x4"),
        ("v5e:4x", "has no sizes"),
        ("v4:4x4", "a slice of v4 has 3 dimensions, such as v4:4x4x4"),
        ("v5p:16x16x16", "has 4096 chips; plan goes up to 1024 a slice"),
        ("h100", "'h100' has no sizes; write them as in h100:8"),
        ("h100:2x8", "a slice of h100 has 1 dimension, such as h100:8"),
        ("h100:16", "a machine has up to 8; several are --topology=h100:8 --slices=N"),
        ("h10:8", r"'h10' is not a kind of chip that is known \(did you mean 'h100'\?\)"),
    ],
)
def test_a_topology_that_does_not_exist_is_an_error_of_one_line(name, message):
    with pytest.raises(UserError, match=message):
        topology(name)


def test_every_generation_s_figures_are_of_the_right_size():
    """Later generations are no slower, and a figure in other units would be a thousand times off."""
    for chip in CHIPS.values():
        assert 1e14 < chip.flops < 1e16 and 5e11 < chip.bandwidth < 1e13 and 1e11 < chip.ici < 1e12
        assert 1e9 < chip.dcn < 1e11 and 16 <= chip.memory / 2**30 <= 192
        assert chip.links == 2 * chip.dimensions if chip.platform == "tpu" else 1e10 < chip.ici / chip.links < 3e10


def test_a_mesh_of_other_devices_is_refused_with_one_that_fits():
    e = Experiment(mesh=Mesh(tensor=2), train=Train(batch=16))
    with pytest.raises(UserError, match=r"is 2 devices, and v5e:2x4 has 8; set --config.mesh.fsdp=4"):
        plan.check_mesh(e, topology("v5e:2x4"))
    with pytest.raises(UserError, match=r"has 16 \(tpu7x counts 2 devices a chip\); set --config.mesh.fsdp=8"):
        plan.check_mesh(e, topology("tpu7x:2x2x2"))
    with pytest.raises(UserError, match=r"mesh.slice: 1, and there are 2 slices"):
        plan.check_mesh(Experiment(mesh=Mesh(fsdp=8)), topology("v5e:2x2", 2))


def test_smaller_changes_come_first_and_all_are_valid():
    e = small.experiment(mesh=Mesh(data=2, fsdp=2), train={"batch": 16})
    found = list(plan.smaller(e))
    assert found[:3] == [{"model.remat": name} for name in ("dots", "dots_without_batch", "full")]
    assert found[3] == {"model.remat": "full", "train.accumulate": 2}
    assert found[-1] == {"model.remat": "full", "mesh.data": 1, "mesh.fsdp": 4, "train.accumulate": 4}
    for changes in found:
        config.check(override(e, changes), given=changes)


def test_temporaries_are_those_of_the_main_memory():
    account = (
        "allocation 3: size 100, page 0, parameter 8, shape |f32[25]| at ShapeIndex {}:\n"
        "allocation 4: size 4096, page 0, preallocated-temp:\n value: <1 a @0> (size=4096,offset=0): f32[1024]\n"
        "allocation 5: size 777, color 1, page 0, preallocated-temp:\n"
    )
    assert ahead.temporaries(account) == 4096


# With the TPUs' compiler

TINY = Experiment(
    model=Model(depth=2, width=256, heads=2, context=256, stack="scan", dtype="bfloat16"),
    tokenizer=Bytes(),
    train=Train(batch=8, steps=10, warmup=1),
    mesh=Mesh(fsdp=4),
)


def planned(tmp_path, topology):
    """What the whole command says of a small model on four chips: the memory is that of its weights, the times follow
    from one another, and nothing else is said."""
    file = tmp_path / "tiny.py"
    file.write_text(
        "from transformer.config import Experiment\nfrom transformer.settings import from_dict\n"
        f"def get_config():\n    return from_dict(Experiment, {to_dict(TINY)!r})\n"
    )
    command = [sys.executable, "-m", "transformer", "plan", f"--config={file}", f"--topology={topology}", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=300, check=True)
    found = json.loads(done.stdout)
    weights = 2 * 257 * 256 + 5 * 256 + 2 * 12 * 256**2
    assert found["fits"] is True and found["nearest"] is None
    assert found["memory"]["parameters"] == pytest.approx(weights * 4 / 4, rel=0.2)  # the positions besides
    assert found["memory"]["optimizer"] == pytest.approx(2 * found["memory"]["parameters"], rel=1e-3)
    assert found["times"]["step"] == max(found["times"][n] for n in ("compute", "memory", "network"))
    assert found["tokens_per_second"] == pytest.approx(8 * 256 / found["times"]["step"])
    assert found["chip_hours"] == pytest.approx(10 * found["times"]["step"] * 4 / 3600)
    assert found["decode"]["fits"] is True and found["decode"]["memory"]["cache"] == 2 * 2 * 256 * 256 * 2
    assert all(line.startswith("compiling") for line in done.stderr.splitlines()), done.stderr
    return found


@needs_libtpu
def test_the_whole_command(tmp_path):
    found = planned(tmp_path, "v5e:2x2")
    assert {c["kind"] for c in found["collectives"]} & {"all-gather", "collective-permute"}


@needs_libtpu
def test_what_does_not_fit_says_so_and_the_nearest_change_does():
    """32 blocks whose backward pass keeps everything: as 2048 tokens of width 1024 on each of four chips cannot."""
    model = dataclasses.replace(TINY.model, depth=32, width=1024, heads=8, context=2048)
    e = dataclasses.replace(TINY, model=model, train=dataclasses.replace(TINY.train, batch=64))
    where = topology("v5e:2x2")
    compiled = ahead.compile_ahead(e.program, where, "train", 300)
    assert not compiled.fits and compiled.needed > compiled.available > 15 * 2**30
    assert plan.training(e, where, compiled)["fits"] is False
    nearest = plan.nearest(e, where, 300, lambda line: None)
    assert nearest is not None
    again = ahead.compile_ahead(override(e, nearest["changes"]).program, where, "train", 300)
    assert again.fits and 0 < again.temporaries < 16 * 2**30


@needs_libtpu
def test_a_longer_stack_takes_no_longer_and_the_attention_is_the_tpu_s():
    programs = []
    for depth in (4, 16):
        e = dataclasses.replace(TINY, model=dataclasses.replace(TINY.model, depth=depth))
        programs.append(ahead.compile_ahead(e.program, topology("v5e:2x2"), "train", 300).text)
    assert len(programs[1]) < 1.2 * len(programs[0])
    assert "splash_mqa_fwd" in programs[0] and "splash_mqa_dkv" in programs[0] and "splash_mqa_dq" in programs[0]


def test_of_gathers_that_were_merged_each_counts():
    """One start of two: what goes in stands before what comes out."""
    program = (
        "ENTRY %main (a: f32[128], b: bf16[16,256]) -> f32[1] {\n"
        "  %a = f32[128]{0} parameter(0)\n  %b = bf16[16,256]{1,0} parameter(1)\n"
        "  %start = ((f32[128]{0}, bf16[16,256]{1,0}), (f32[512]{0}, bf16[64,256]{1,0})) all-gather-start(%a, %b), "
        "channel_id=1, replica_groups=[1,4]<=[4], dimensions={0}\n}\n"
    )
    (found,) = hlo.collectives(*hlo.parse(program), 4)
    assert found.kind == "all-gather" and found.size == 512 * 4 + 64 * 256 * 2
    assert hlo.traffic(*hlo.parse(program)) == found.size + 128 * 4 + 16 * 256 * 2
    reduced = program.replace("((f32[128]{0}, bf16[16,256]{1,0}), (f32[512]{0}, bf16[64,256]{1,0})) all-gather", "ALL")
    reduced = reduced.replace("ALL", "(f32[128]{0}, bf16[16,256]{1,0}) all-reduce")
    assert hlo.traffic(*hlo.parse(reduced)) == 2 * (128 * 4 + 16 * 256 * 2)
    assert hlo.traffic(*hlo.parse(reduced.replace("-start", ""))) == 2 * (128 * 4 + 16 * 256 * 2)


@pytest.mark.parametrize(
    ("kind", "between"),
    [("all-gather", 1 / 16), ("reduce-scatter", 1 / 16), ("all-reduce", 1 / 8), ("all-to-all", 1 / 2)],
)
def test_what_goes_between_machines_is_carried_by_all_devices_of_each(kind, between):
    """Two machines of 8: half of an array is missing in each, an eighth of that comes through each device's card. An
    exchange is each device's own. Among machines alone everything goes between, inside one nothing."""
    one = hlo.Collective(kind, 1, 1.0, 16, 2, "")
    assert one.across and one.between == pytest.approx(between) and one.between < one.moved
    alone = dataclasses.replace(one, devices=2)
    assert alone.between == pytest.approx(alone.moved)
    assert dataclasses.replace(one, slices=1).between == 0 and not dataclasses.replace(one, slices=1).across


def test_the_element_of_a_tuple_s_shape():
    shape = "(s32[], (bf16[8,128]{1,0:T(8,128)(2,1)}, f32[2]{0}), /*index=2*/f32[3]{0})"
    assert hlo.size(hlo.element(shape, "#1#0")) == 8 * 128 * 2
    assert hlo.size(hlo.element(shape, "#1")) == 8 * 128 * 2 + 8
    assert hlo.size(hlo.element(shape, "#2")) == 12 and hlo.element("f32[7]", "") == "f32[7]"


@needs_libtpu
@pytest.mark.parametrize("mesh", [Mesh(slice=2, fsdp=2), Mesh(context=4), Mesh(data=2, tensor=2)], ids=str)
@pytest.mark.exhaustive
def test_every_mesh_compiles(mesh):
    """With a window: by the TPU's own kernel, or, where positions are cut, by ours."""
    attention = dataclasses.replace(TINY.model.attention, span=Sliding(window=100))
    model = dataclasses.replace(TINY.model, attention=attention)
    where = topology("v5e:1x2", 2) if mesh.slice > 1 else topology("v5e:2x2")
    e = dataclasses.replace(TINY, mesh=mesh, model=model, tokenizer=Bpe(vocab_size=512))
    assert plan.plan(e, where, limit=300, code=False, say=lambda line: None)["fits"]
