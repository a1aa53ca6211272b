"""A model that was made half before a plan with fp32 masters: its floating buffers follow them."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from lightning_mp import MixedPrecisionPlan
from support.comparing import same
from support.norms import Normed, run

MADE = {"half": nn.Module.half, "bfloat16": nn.Module.bfloat16}
MASTERS = ("32-true", "bf16-mixed", "16-mixed")


def _made(how: str, module: nn.Module, back: bool = False) -> None:
    MADE[how](module)
    if back:
        module.float()


@pytest.mark.parametrize("pins", [None, {"BatchNorm1d": "fp32"}])
@pytest.mark.parametrize("mode", MASTERS)
@pytest.mark.parametrize("how", MADE)
def test_it_trains_as_one_that_was_made_fp32_again(how: str, mode: str, pins: Any) -> None:
    found, expected = (
        run("single", mode, Normed(prepare=partial(_made, how, back=b)), pins=pins) for b in (False, True)
    )
    assert same(found, expected)


class Odd(nn.Module):
    """A parameter of one half dtype, and buffers of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
        self.inner = nn.Module()  # as a rotary embedding: without parameters
        kinds = torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.complex64, torch.int64, torch.bool
        for kind in kinds:
            self.inner.register_buffer(f"b_{str(kind)[6:]}", torch.ones(2).to(kind))


@pytest.mark.parametrize("mode", MASTERS)
def test_buffers_of_another_dtype_than_the_weights_stay_what_they_were_made(mode: str) -> None:
    MixedPrecisionPlan(mode).apply(odd := Odd())
    assert odd.weight.dtype == torch.float32
    found = {name[2:]: str(tensor.dtype)[6:] for name, tensor in odd.inner.named_buffers()}
    assert found.pop("bfloat16") == "float32"
    assert all(name == dtype for name, dtype in found.items())
