"""Compiled by inductor on CUDA: pins hold in the backward pass, and nothing waits."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_mp import LossScaling, MixedPrecisionPlan
from support.cuda import Resident, cuda_fit
from support.models import Regression

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore"),  # inductor's own
]
WIDTH, LARGE = 64, 1e5


class Scaled(nn.Module):
    """A product of inputs that fp16 cannot hold, and its result of ordinary size."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.norm, self.back = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.back(self.norm(nn.functional.gelu(self.wide(x))) * LARGE) / LARGE


class Pinned(Regression):
    def __init__(self) -> None:
        super().__init__(lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True))
        torch.manual_seed(0)
        self.net = Scaled()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.losses.append(loss.detach())
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if not hasattr(self, "first"):
            self.first = {name: p.grad.clone() for name, p in self.named_parameters() if p.grad is not None}


def _run(mode: str, backend: str | None, **more: Any) -> tuple[Pinned, MixedPrecisionPlan]:
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randn(32, WIDTH, generator=generator) for _ in range(8)]
    scaling = LossScaling(init_scale=2.0**16) if mode == "16-mixed" else None
    plan, module = MixedPrecisionPlan(mode, pins={"net": "fp32"}, loss_scaling=scaling), Pinned()
    if backend is not None:
        module.net.compile(backend=backend)
    cuda_fit(module, data=Resident([[x, x.sum(1, keepdim=True)] for x in rows]), plugins=[plan], **more)
    return module, plan


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("mode", ["16-mixed", "bf16-mixed"])
def test_pins_hold_in_the_compiled_backward_pass(mode: str, backend: str) -> None:
    torch.compiler.reset()
    eager, _ = _run(mode, None)
    compiled, plan = _run(mode, backend)
    assert plan.skipped_steps == 0
    for name, gradient in eager.first.items():
        torch.testing.assert_close(compiled.first[name], gradient, rtol=1e-4, atol=1e-5 * float(gradient.abs().max()))
