"""The standard comparison and the device check, small, on this machine; that what is wrong is called so."""

import dataclasses
from typing import Any

import jax
import pytest

from transformer.analysis import contender, device_check, kinds, suite
from transformer.errors import UserError
from transformer.model import kernels
from transformer.model.attention import KINDS
from transformer.model.grouped import Grouped, MultiHead
from transformer.model.kernels import Kernel


@pytest.mark.exhaustive
def test_the_comparison_measures_in_turns_and_makes_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two real contenders; a third that fails is an error with its last line."""
    made: list[Any] = []

    class Noted(suite.Contender):
        def __init__(self, *args: Any, **asked: Any):
            super().__init__(*args, **asked)
            made.append(self)

    monkeypatch.setattr(suite, "Contender", Noted)
    monkeypatch.setattr(suite, "peers_installed", lambda: False)
    monkeypatch.setattr(suite, "ROUNDS", 1)
    monkeypatch.setattr(suite, "DTYPES", ("float32",))  # bfloat16 is slow on a CPU
    said: list[str] = []
    found = suite.suite(["train"], ["S"], said.append)
    assert [(row["size"], row["dtype"]) for row in found["train"]] == [("S", "float32")]
    for row, each in zip(found["train"], made, strict=True):
        assert len(each.times) == suite.ROUNDS and row["seconds"] == sorted(each.times)[suite.ROUNDS // 2]
        assert row["tokens_per_second"] == pytest.approx(16 * 256 / row["seconds"])
        assert 0 < row["mfu"] < 1.5 and row["first_step"] > row["seconds"] and row["peak_memory"] > 2**27
        # 6 N n + 12 L D T n, N = 12 L D^2 + V D
        flops = 4096 * (6 * (12 * 4 * 128**2 + 4096 * 128) + 12 * 4 * 128 * 256)
        assert row["mfu"] == pytest.approx(flops / row["seconds"] / found["limits"][f"matmul_{row['dtype']}"])
    assert any("no peers" in line for line in said)
    table = suite.text(found)
    assert "| size | who | dtype |" in table and table.count("| S | ours |") == 1
    with pytest.raises(RuntimeError, match=r"ended: .*KeyError"):
        suite.Contender(who="ours", what="train", size="XXL", dtype="float32")


@pytest.mark.parametrize(("parts", "sizes"), [(["trian"], ["S"]), (["train"], ["XL"])])
def test_what_is_no_part_or_size_is_refused(parts: list[str], sizes: list[str]) -> None:
    with pytest.raises(UserError, match="is not one of"):
        suite.suite(parts, sizes, lambda line: None)


@pytest.mark.exhaustive
def test_every_kind_of_attention_is_measured_and_a_new_one_shows_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """One block of a few numbers; a row that is put into the table is in the result, with no plain kernel beside it."""

    @dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
    class Novel(MultiHead):
        pass

    def check(model: Any) -> None:
        if model.attention.kernel == "plain":
            raise UserError("it has no table of scores")

    monkeypatch.setattr(kinds, "KINDS", {Novel: KINDS[MultiHead]._replace(check=check), Grouped: KINDS[Grouped]})
    monkeypatch.setitem(KINDS, Novel, kinds.KINDS[Novel])
    for name, value in {"WIDTH": 16, "HEADS": 2, "CONTEXT": 8, "ROUNDS": 1}.items():
        monkeypatch.setattr(kinds, name, value)
    every = kinds.kinds
    monkeypatch.setattr(kinds, "kinds", lambda: list(every())[:2])
    limits = {"matmul_float32": 1e9, "memory_bandwidth": 1e9}
    rows = kinds.measure(limits, lambda line: None)
    assert [row["kind"] for row in rows] == ["novel", "grouped"]
    names = {"forward", "forward_and_backward", "decode"}
    for row in rows:
        plain = {"plain_forward", "plain_forward_and_backward"} if row["kind"] == "grouped" else set()
        assert set(row) == {"kind", *names, *plain, *(f"{name}_floor" for name in names)}
        assert all(value > 0 for name, value in row.items() if name != "kind")
    # 16 x 16 weights for query, key, value and out; 4.5 of 8 keys, seen twice by 2 heads of 8.
    assert rows[0]["forward_floor"] == pytest.approx(1e3 * 2 * 8 * (4 * 256 + 2 * 4.5 * 16) / 1e9)
    assert rows[0]["decode_floor"] == pytest.approx(1e3 * 4 * (4 * 256 + 2 * 8 * 16) / 1e9)
    assert "kinds" not in suite.PARTS, "asked for by name alone"


@pytest.mark.exhaustive
def test_the_device_check_passes_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(contender.SIZES, "S", (16, 1, 2, 32, 64, 2))
    said: list[str] = []
    found = device_check.check(said.append, "S", 160, (256,))
    assert found["ok"] and {row["kernel"] for row in found["kernels"]} == {"plain", "blockwise"}
    assert len(found["kernels"]) == 8 and len(found["contexts"]) == 2 and found["training"][1]["mfu"] > 0
    assert any("splash, bfloat16, packed: not run: it is for TPUs" in line for line in said)


def test_the_device_check_finds_a_wrong_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(device_check, "TOLERANCE", {"float32": device_check.TOLERANCE["float32"]})
    assert all(row["ok"] for row in device_check.kernels(160, said.append)) and "WRONG" not in "".join(said)

    def half(*args: Any) -> jax.Array:
        return 0.5 * kernels.blockwise(*args)

    monkeypatch.setitem(kernels.KERNELS, "blockwise", Kernel(half, lambda call: None, True))
    assert not all(row["ok"] for row in device_check.kernels(160, said.append)) and "WRONG" in said[-3]
