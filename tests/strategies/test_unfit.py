"""Weights that cannot be held in pieces are refused by name, before a strategy takes the module."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_mp.errors import Faults
from lightning_mp.strategies import unfit

SCALAR, NORM = "'scale', a parameter without a dimension, with ", "'table' with max_norm=0.5"


class Model(nn.Module):
    """A scalar, a vector of one number, and an embedding whose forward scales its rows."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.gain = nn.Parameter(torch.tensor(1.0)), nn.Parameter(torch.ones(1))
        self.table, self.other = nn.Embedding(4, 4, max_norm=0.5), nn.Embedding(4, 4)


def _given(faults: Faults) -> list[str]:
    return [fault.given for fault in faults.found]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_refuses_scalars_and_at_stage_3_max_norm(stage: int) -> None:
    unfit.refuse_with_zero(Model(), stage, faults := Faults())
    given = _given(faults)
    assert given[0] == f"{SCALAR}ZeRO"
    assert [one.startswith(NORM) for one in given[1:]] == [True] * (stage == 3)


def test_shards_refuse_both_but_what_is_not_sharded() -> None:
    unfit.refuse_weights(model := Model(), (), faults := Faults())
    assert _given(faults)[0] == f"{SCALAR}sharded weights"
    assert _given(faults)[1].startswith(NORM)
    unfit.refuse_weights(model, [model.scale], faults := Faults())
    assert len(faults.found) == 1
