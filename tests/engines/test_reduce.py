"""What goes over the wire, in a group of one; two processes are in tests/plan/test_ddp_gloo.py."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_mp.engines import reduce

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("wire", DTYPES)
@pytest.mark.parametrize("stored", DTYPES)
def test_a_hook_is_needed_where_the_dtypes_differ(stored: str, wire: str) -> None:
    assert reduce.needs_hook(nn.Linear(2, 2, dtype=DTYPES[stored]), wire) == (stored != wire)


def test_one_pinned_module_is_enough_and_frozen_ones_do_not_count() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, dtype=torch.bfloat16))
    assert reduce.needs_hook(net, "fp32")
    net[1].requires_grad_(False)
    assert not reduce.needs_hook(net, "fp32")


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("value", [0.0, 1.0])
def test_the_flag_becomes_its_maximum_in_place(value: float) -> None:
    flag = torch.tensor(value)
    reduce.max_over_ranks_(flag)
    assert flag.item() == value


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("wire", DTYPES)
@pytest.mark.parametrize("stored", DTYPES)
def test_gradients_keep_their_own_dtype_and_the_wires_rounding(stored: str, wire: str) -> None:
    net = nn.Linear(3, 1, bias=False, dtype=DTYPES[stored])
    wrapped = DistributedDataParallel(net)
    reduce.reduce_in(wrapped, wire)
    x = torch.tensor([[1.0, 1 / 3, 3.14159]], dtype=DTYPES[stored])
    wrapped(x).sum().backward()
    assert net.weight.grad is not None
    assert net.weight.grad.dtype == DTYPES[stored]
    assert torch.equal(net.weight.grad, x.to(DTYPES[wire]).to(DTYPES[stored]))
