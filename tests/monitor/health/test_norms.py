"""Sums of squares by name, copies, which parameters a group means, memory: against torch's own norms."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_mp.errors import Faults
from lightning_mp.monitor.health import measurement
from lightning_mp.monitor.health.measurement import (
    Layout,
    Shard,
    SquareSums,
    copied,
    in_groups,
    memory,
    named_parameters,
)
from lightning_mp.numerics.grads import squares
from support.models import Regression

CPU = torch.device("cpu")


def shards(*tensors: Tensor) -> list[Shard]:
    return [Shard(tensor, ()) for tensor in tensors]


def norm(*tensors: Tensor) -> float:
    return float(torch.cat([tensor.double().flatten() for tensor in tensors]).norm())


def sums() -> SquareSums:
    return SquareSums(CPU, [()])


@given(st.lists(st.tuples(st.integers(0, 9), st.sampled_from([torch.float16, torch.bfloat16, torch.float64]))))
def test_squares_of_every_dtype_and_size_in_order(kinds: list[tuple[int, torch.dtype]]) -> None:
    tensors = [torch.full((size,), 3.0, dtype=dtype) for size, dtype in kinds]
    assert squares(tensors, CPU).tolist() == pytest.approx([9.0 * size for size, _ in kinds], rel=1e-6)


def test_a_half_precision_norm_is_taken_in_fp32() -> None:
    assert squares([torch.full((100,), 6e4, dtype=torch.float16)], CPU).item() == pytest.approx(100 * 6e4**2, rel=1e-3)


def test_each_name_has_the_norm_of_its_places() -> None:
    a, b, c = torch.randn(5), torch.randn(2, 3), torch.randn(4)
    found = sums()
    found.add(shards(a, b, c), {"all": None, "ends": {0, 2}, "none": set()})
    seen = {name: value.item() for name, value in found.norms().items()}
    assert seen == pytest.approx({"all": norm(a, b, c), "ends": norm(a, c), "none": 0.0}, rel=1e-6)


def test_a_bad_value_stays_in_its_own_group() -> None:
    found = sums()
    found.add(shards(torch.ones(4), torch.full((2,), float("nan"))), {"all": None, "fine": {0}})
    seen = found.norms()
    assert seen["fine"].item() == 2.0
    assert seen["all"].isnan()


def test_what_is_added_later_counts_too_and_a_divisor_divides() -> None:
    found = sums()
    found.add(shards(torch.full((4,), 2.0**20)), {"all": None}, divisor=torch.tensor(2.0**20))
    found.add(shards(torch.ones(5)), {"all": None})
    assert found.norms()["all"].item() == 3.0


def test_copies_are_of_small_and_non_contiguous_parameters_of_a_kind_in_one() -> None:
    tensors = [torch.randn(7, 5).t(), torch.randn(3), torch.empty(0), torch.randn(4).double()]
    kept = copied(shards(*tensors))
    assert [shard.tensor.tolist() for shard in kept.values()] == [
        torch.cat([tensor.reshape(-1) for tensor in tensors[:3]]).tolist(),
        tensors[3].tolist(),
    ]
    tensors[1].zero_()
    assert norm(*(shard.tensor for shard in kept.values())) > norm(*tensors)


def test_of_a_large_parameter_pieces_from_all_of_it_are_kept() -> None:
    large = torch.randn(3 * measurement.PIECES * measurement.PIECE + 5)
    (shard,) = copied(shards(large)).values()
    assert norm(shard.tensor) == pytest.approx(norm(large) / 3**0.5, rel=0.05)
    assert shard.tensor[-1, -1] in large[-large.numel() // 16 :]


@pytest.mark.parametrize(
    ("pattern", "members"),
    {
        "net.3": {"net.3.weight", "net.3.bias"},
        "LayerNorm": {"net.1.weight", "net.1.bias"},
        "Linear": {"net.0.weight", "net.0.bias", "net.3.weight", "net.3.bias"},
        "net": {f"net.{place}.{name}" for place in (0, 1, 3) for name in ("weight", "bias")},
    }.items(),
)
def test_a_group_is_what_lies_in_or_below_the_modules_that_match(pattern: str, members: set[str]) -> None:
    assert in_groups(Regression(), {"mine": pattern}, Faults())["mine"] == members


def test_wrappers_do_not_show_in_names() -> None:
    module = Regression()
    module.net = torch.compile(module.net, backend="eager")  # type: ignore[assignment]
    assert set(named_parameters(module)) == set(named_parameters(Regression()))
    assert in_groups(module, {"head": "net.3"}, Faults())["head"] == {"net.3.weight", "net.3.bias"}


def test_a_tied_weight_is_in_every_group_that_names_one_of_its_owners() -> None:
    root = nn.ModuleDict({"inner": nn.Linear(3, 3, bias=False), "outer": nn.Linear(3, 3, bias=False)})
    root["outer"].weight = root["inner"].weight
    found = in_groups(root, {"in": "inner", "out": "outer"}, Faults())
    assert list(named_parameters(root)) == ["inner.weight"]
    assert all("inner.weight" in members for members in found.values())


def test_a_pattern_that_matches_nothing_names_the_nearest() -> None:
    faults = Faults()
    in_groups(Regression(), {"a": "LayerNrm"}, faults)
    (fault,) = faults.found
    assert "'a'" in fault.given
    assert "LayerNorm" in fault.fix


def test_gradients_of_every_kind_have_their_norm() -> None:
    """Sparse ones once an index, complex ones as pairs, none at all as nothing."""
    table, wave, idle = (
        nn.Embedding(9, 4, sparse=True),
        nn.Parameter(torch.randn(3, dtype=torch.complex64)),
        nn.Linear(2, 2),
    )
    (table(torch.tensor([1, 1, 2])).sum() + (wave * 2).abs().pow(2).sum()).backward()
    layout, found = Layout(), sums()
    members: list[Any] = [table.weight, wave, idle.weight]
    found.add([layout.gradient(member) for member in members], {"all": None})
    dense = torch.tensor([2.0] * 4 + [1.0] * 4)
    assert found.norms()["all"].item() == pytest.approx(norm(dense, torch.view_as_real(wave.grad)), rel=1e-6)
    assert layout.parameter(wave).tensor.shape == (3, 2)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells what is resident now")
def test_on_a_cpu_memory_is_what_the_process_holds_and_its_peak() -> None:
    before, _, _ = memory(CPU)
    held = torch.ones(2**27)  # half a GiB
    assert before is not None
    now, reserved, peak = memory(CPU)
    assert now == pytest.approx(before + held.nbytes / 2**30, abs=0.1)
    assert reserved is None
    assert peak is not None
    assert peak >= before + held.nbytes / 2**30 - 0.1
    assert memory(torch.device("meta")) == (None, None, None)
