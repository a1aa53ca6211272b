"""Whose weight a product takes, where weights lie side by side in memory."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_mp import PlanError
from lightning_mp.errors import Faults
from lightning_mp.modules.outside_reads import refused
from lightning_mp.modules.pins import resolve
from lightning_mp.policy import Pin


@pytest.mark.parametrize(("seen", "begin"), [(16, 16), (1, 1)])
def test_a_weight_ends_where_its_memory_does(seen: int, begin: int) -> None:
    """The second is one number that is seen everywhere, as a weight on another pipeline stage."""
    memory = torch.ones(begin + 16)
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    net[0].weight.data = memory[:seen].expand(16).view(4, 4) if seen == 1 else memory[:seen].view(4, 4)
    net[1].weight.data = memory[begin:].view(4, 4)
    pin_map = resolve(net, (Pin("0", "fp32"),), Faults())
    with refused(net, pin_map, torch.bfloat16, mixed=True), torch.autocast("cpu", torch.bfloat16):
        net[1](torch.ones(2, 4))
        with pytest.raises(PlanError, match=r"pin '0' to fp32 on 0\.weight"):
            nn.functional.linear(torch.ones(2, 4), net[0].weight)
