"""Activation checkpointing on CUDA: the same numbers in less memory, through the plan and through the callback."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_mp import Checkpointing, MixedPrecisionPlan
from lightning_mp.callbacks import ActivationCheckpointing
from support.cuda import Resident, cuda_fit
from support.models import Regression, same_weights, weights

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

WIDTH, BLOCKS = 512, 8


class Block(nn.Module):
    """A residual two-layer net with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.back, self.dropout = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.back(nn.functional.gelu(self.wide(x))))


class Deep(Regression):
    """Blocks between a first and a last layer."""

    def __init__(self) -> None:
        super().__init__(lambda p: torch.optim.SGD(p, lr=1e-4, fused=True))
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(16, WIDTH), *(Block() for _ in range(BLOCKS)), nn.Linear(WIDTH, 1))


def _run(**options: Any) -> tuple[Deep, int]:
    module = Deep()
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(4096, 16, generator=generator)
    torch.manual_seed(2)
    torch.cuda.reset_peak_memory_stats()
    cuda_fit(module, data=Resident([[x, x.sum(1, keepdim=True)]] * 3), **options)
    return module, torch.cuda.max_memory_allocated()


@pytest.mark.parametrize("mode", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("mechanism", ["plan", "selective plan", "callback"])
def test_the_same_numbers_in_less_memory(mode: str, mechanism: str) -> None:
    plain, usual = _run(plugins=[MixedPrecisionPlan(mode)])
    if mechanism == "callback":
        module, peak = _run(precision=mode, callbacks=[ActivationCheckpointing("Block")])
    else:
        rule: Any = "Block" if mechanism == "plan" else Checkpointing(modules="Block", mode="selective")
        module, peak = _run(plugins=[MixedPrecisionPlan(mode, checkpointing=rule)])
    assert module.losses == plain.losses
    assert same_weights(weights(module), weights(plain))
    assert peak < (0.7 if "selective" not in mechanism else 0.95) * usual
