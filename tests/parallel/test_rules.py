"""The mesh and the table of layouts: what cannot be laid out is refused before any work, with names and sizes."""

import dataclasses
import itertools

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from tests import small
from transformer.config import check
from transformer.errors import UserError
from transformer.parallel.mesh import Mesh, make_mesh, sizes
from transformer.parallel.rules import RULES, check_divides, mesh_axes, put, shards, spec
from transformer.settings import hints


@pytest.mark.parametrize(
    ("settings", "mesh", "message"),
    [
        ({"vocab": 50257}, Mesh(tensor=8), r"embedding .*\(50257, 32\).*vocab of 50257 .* mesh.tensor=8"),
        (
            {"heads": 6, "width": 24, "vocab": 32},
            Mesh(tensor=4),
            r"attention/\w+/w .*(kv_)?heads of 6 .* mesh.tensor=4",
        ),
        ({"train": {"batch": 19}}, Mesh(data=4), r"config.train.batch=19: batch of 19 .* mesh.data=4"),
        (
            {"train": {"batch": 16, "accumulate": 4}},
            Mesh(data=4, fsdp=2),
            r"batch=16 / train.accumulate=4: batch of 4 .* mesh.data=4 x mesh.fsdp=2",
        ),
        ({"width": 30, "heads": 2}, Mesh(fsdp=4), r"weight \S+ of shape .*: width of 30 .* mesh.fsdp=4"),
    ],
    ids=["vocabulary", "heads", "rows", "rows of a part", "width"],
)
def test_sizes_that_do_not_divide_are_refused(settings, mesh, message):
    """S03: one line that names the array, the axis and both sizes; what fits passes."""
    e = small.experiment(**{"width": 32, "heads": 8, "train": {"batch": 16}} | settings)
    with pytest.raises(UserError, match=message) as caught:
        check(dataclasses.replace(e, mesh=mesh))
    assert "\n" not in str(caught.value)
    check(e)


def test_what_divides_is_accepted():
    check(small.experiment(width=32, heads=8, vocab=32, mesh=Mesh(data=2, fsdp=2, tensor=2)))


def test_a_mesh_is_explicit_and_uses_as_many_devices_as_asked_for():
    for mesh in (Mesh(), Mesh(data=8), Mesh(data=2, fsdp=2, tensor=2), Mesh(tensor=3)):
        made = make_mesh(mesh)
        assert dict(made.shape) == sizes(mesh)
        assert set(made.axis_types) == {AxisType.Explicit}


@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        (Mesh(data=4, tensor=4), "config.mesh: data=4 x tensor=4 needs 16 devices, found 8 .cpu."),
        (Mesh(fsdp=0), "config.mesh.fsdp: 0 is not a number of devices"),
        (Mesh(data=-1, tensor=-1), "config.mesh.data: -1"),
    ],
)
def test_an_impossible_mesh_is_refused(mesh, message):
    with pytest.raises(UserError, match=message):
        make_mesh(mesh)


def test_rules_name_mesh_axes_that_exist():
    for axes in RULES.values():
        assert set(axes) <= set(hints(Mesh))


def test_an_undeclared_axis_is_an_error():
    with small.on(Mesh()), pytest.raises(KeyError, match="widht"):
        spec("batch", "widht")


def test_one_mesh_axis_on_two_dimensions_is_an_error():
    with small.on(Mesh()), pytest.raises(ValueError, match="two dimensions"):
        spec("heads", "mlp")


def test_without_a_mesh_nothing_is_laid_out():
    assert spec("batch", "time") is None
    x = np.ones((2, 2))
    assert put(x, "batch", "time") is x


def test_layouts_by_name():
    with small.on(Mesh(data=2, fsdp=2, tensor=2)):
        assert spec("batch", None, "vocab") == PartitionSpec(("slice", "data", "fsdp", "expert"), None, "tensor")
        assert spec("width", "time") == PartitionSpec("fsdp", "context")
        laid = jax.jit(lambda x: put(x, "batch", "heads"))(np.zeros((8, 4)))
        assert laid.sharding.shard_shape(laid.shape) == (2, 2)
    assert mesh_axes(None) == ()


@pytest.mark.parametrize(("data", "fsdp", "tensor"), list(itertools.product((1, 2, 3), repeat=3)))
def test_what_check_divides_accepts_divides(data, fsdp, tensor):
    by_axis = sizes(Mesh(data=data, fsdp=fsdp, tensor=tensor))
    for rows, width in itertools.product((1, 4, 6, 9), repeat=2):
        fits = rows % shards("batch", by_axis) == 0 and width % shards("heads", by_axis) == 0
        try:
            check_divides("x", (rows, width), ("batch", "heads"), by_axis)
        except UserError:
            assert not fits
        else:
            assert fits
