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
PINS = {"Linear": "fp32"}


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


def _parts(module: Large, **how: Any) -> Large:
    module.net = torch.compile(module.net, **how)  # type: ignore[assignment]
    return module


WAYS: dict[str, Any] = {
    "torch.compile(module)": torch.compile,
    "module.compile()": lambda module, **how: module.compile(**how) or module,
    "part.compile()": lambda module, **how: module.net.compile(**how) or module,
    "torch.compile(part)": _parts,
}


def _gradients(way: str | None, how: dict[str, Any], run: str = "fit") -> list[Tensor]:
    torch._dynamo.reset()
    module = Large()
    compiled = module if way is None else WAYS[way](module, backend="aot_eager")
    runner = trainer(inference_mode=False, **how)
    getattr(runner, run)(compiled, batches())
    return module.gradients


def _plan(mode: str) -> dict[str, Any]:
    return {"plugins": [plan_for(mode, pins=PINS)]}


@pytest.mark.parametrize("mode", ["16-mixed", "bf16-mixed"])
@pytest.mark.parametrize("way", WAYS)
def test_a_pin_holds_in_a_compiled_backward(way: str, mode: str) -> None:
    eager, compiled = _gradients(None, _plan(mode)), _gradients(way, _plan(mode))
    assert len(compiled) == 8 * 4
    assert all(map(torch.equal, eager, compiled))
    assert all(gradient.isfinite().all() for gradient in compiled)


@pytest.mark.parametrize(("how", "run"), [("plan", "test"), ("DtypePinning", "fit")])
def test_it_holds_in_evaluation_and_with_stock_plugins(how: str, run: str) -> None:
    def given() -> dict[str, Any]:
        return _plan("bf16-mixed") if how == "plan" else {"precision": "bf16-mixed", "callbacks": [DtypePinning(PINS)]}

    eager, compiled = (_gradients(way, given(), run=run) for way in (None, "part.compile()"))
    assert len(compiled) == 8 * 4
    assert all(map(torch.equal, eager, compiled))
