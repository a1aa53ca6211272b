"""A compiled run is the eager run: autocast is off where a pin says so, in the backward pass too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_mp.callbacks import DtypePinning
from lightning_mp.compat.lightning import LightningModule
from support.models import FEATURES, batches
from support.oracles import plan_for
from support.running import trainer

pytestmark = pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf"
)  # torch's tracing asks


class Large(LightningModule):
    """Its activations are of 1e5, past the largest number of fp16; it keeps every step's gradients."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.net = nn.Sequential(nn.Linear(FEATURES, 8), nn.Linear(8, 1))
        self.gradients: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x * 1e5)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return (self(batch[0]).float() * 1e-5 - batch[1]).pow(2).mean()

    def test_step(self, batch: Any, batch_idx: int) -> None:
        """Takes gradients, as what adapts to the data that it meets."""
        with torch.enable_grad():
            loss = self.training_step(batch, batch_idx)
        with torch.autocast("cpu", enabled=False):
            self.gradients += torch.autograd.grad(loss, [*self.parameters()])

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.gradients += [parameter.grad.clone() for parameter in self.parameters()]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-13)


def _gradients(compiles: bool, how: str, run: str) -> list[Tensor]:
    torch._dynamo.reset()
    module, pins = Large(), {"Linear": "fp32"}
    if compiles:
        module.net.compile(backend="aot_eager")
    stock = {"precision": "bf16-mixed", "callbacks": [DtypePinning(pins)]}
    options = {"plugins": [plan_for("bf16-mixed", pins=pins)]} if how == "plan" else stock
    getattr(trainer(inference_mode=False, **options), run)(module, batches())
    return module.gradients


@pytest.mark.parametrize(("how", "run"), [("plan", "test"), ("DtypePinning", "fit")])
def test_it_holds_in_evaluation_and_with_stock_plugins(how: str, run: str) -> None:
    eager, compiled = (_gradients(compiles, how, run) for compiles in (False, True))
    assert len(compiled) == 8 * 4
    assert all(map(torch.equal, eager, compiled))
