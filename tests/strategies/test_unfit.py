"""Weights that cannot be held in pieces are refused by name, unless they are not sharded."""

from __future__ import annotations

import torch
from torch import nn

from lightning_mp.errors import Faults
from lightning_mp.strategies import unfit


def test_a_scalar_that_is_not_sharded_is_accepted() -> None:
    module = nn.Module()
    module.scale = nn.Parameter(torch.tensor(1.0))
    unfit.refuse_weights(module, (), faults := Faults())
    assert len(faults.found) == 1
    unfit.refuse_weights(module, [module.scale], faults := Faults())
    assert not faults.found
