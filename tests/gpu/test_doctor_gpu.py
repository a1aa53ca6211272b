"""What the doctor says of CUDA's autocast without a GPU, against a GPU; and what it says of this one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lightning_mp.monitor.doctor import doctor
from lightning_mp.monitor.doctor.probe import reduces_in_half
from lightning_mp.numerics.device import describe

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

SQUARES: dict[str, Callable[[Tensor], Tensor]] = {
    "times itself": lambda x: x * x,
    "pow": lambda x: x.pow(2),
    "to the power": lambda x: x**2,
    "square": lambda x: x.square(),
    "cast": lambda x: x.float().pow(2),
}


class Norm(nn.Module):
    def __init__(self, square: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16))
        self.square = square

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(self.square(x).mean(-1, keepdim=True) + 1e-6) * self.weight


@pytest.mark.parametrize("name", SQUARES)
def test_a_norm_is_in_half_where_squares_of_1000_overflow(name: str) -> None:
    norm = Norm(SQUARES[name])
    said = reduces_in_half(norm, stored="fp32", given="fp16", autocast="cuda")
    with torch.autocast("cuda", torch.float16):
        output = norm.cuda()(torch.full((2, 16), 1000.0, device="cuda").half())
    assert bool(output.eq(0).all()) == said


def test_this_gpus_facts_decide() -> None:
    facts = describe(torch.device("cuda"))
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    names = {finding.name for finding in doctor(model, "bf16-mixed")}
    assert ("bf16_emulated" in names) == (facts.bf16 != "native")
    off = facts.tf32 and torch.get_float32_matmul_precision() == "highest"
    assert ("tf32_off" in {finding.name for finding in doctor(model, "32-true")}) == off
