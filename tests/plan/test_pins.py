"""Pins in a run: they stay in their dtype, whatever anybody casts meanwhile."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from support.models import Regression, batches, weights
from support.oracles import plan_for
from support.running import fit, trainer

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
lenient = partial(torch.optim.AdamW, lr=1e-3, eps=1e-4, fused=True)


CASTS: dict[str, Any] = {
    "half": (lambda module: module.half(), FP16),
    "bfloat16": (lambda module: module.bfloat16(), BF16),
    "double": (lambda module: module.double(), torch.float64),
    "to": (lambda module: module.to(FP16), FP16),
    "to device and dtype": (lambda module: module.to(device="cpu", dtype=BF16), BF16),
}


@pytest.mark.parametrize("cast", CASTS)
@pytest.mark.parametrize("mode", ["bf16-true", "16-true"])
def test_every_cast_of_the_model_leaves_pins_alone(mode: str, cast: str) -> None:
    """Complaint 4: HalfPrecision's own ``.to``, Fabric's, or a user's must not take a pin's dtype."""
    module = Regression(lenient)
    fit(module, plugins=[plan_for(mode, pins={"LayerNorm": "fp32"})])
    before = weights(module)
    apply, dtype = CASTS[cast]
    apply(module)
    after = weights(module)
    for name in after:
        assert after[name].dtype == (FP32 if name.startswith("net.1.") else dtype)
    for name in ("net.1.weight", "net.1.bias"):
        assert torch.equal(after[name], before[name])  # not through a narrower dtype and back


def test_a_later_plan_replaces_earlier_pins() -> None:
    module = Regression(lenient)
    fit(module, plugins=[plan_for("bf16-true", pins={"LayerNorm": "fp32"})])
    fit(module, plugins=[plan_for("bf16-true", pins={"net.3": "fp32"})])
    dtypes = {name: p.dtype for name, p in module.named_parameters()}
    assert {name for name, dtype in dtypes.items() if dtype == FP32} == {"net.3.weight", "net.3.bias"}
    fit(module, plugins=[plan_for("32-true")])
    assert {p.dtype for p in module.parameters()} == {FP32}
    assert type(module.net[1]) is nn.LayerNorm


class Encoder(Regression):
    """Torch's encoder layer, which takes a fast path of its own in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 16, dropout=0.0, batch_first=True)
        self.net = nn.Sequential(nn.Unflatten(1, (1, 16)), layer, nn.Flatten(), nn.Linear(16, 1))

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)


@pytest.mark.parametrize("pins", [{"norms": "fp32"}, {"linear1": "fp32", "linear2": "fp32"}])
def test_an_encoder_layer_is_evaluated_through_its_pins(pins: dict[str, str]) -> None:
    before, module = torch.backends.mha.get_fastpath_enabled(), Encoder()
    runner = trainer(plugins=[plan_for("bf16-true", pins=pins)], limit_val_batches=1)
    runner.fit(module, batches(), batches())
    runner.validate(module, batches(), verbose=False)
    assert torch.backends.mha.get_fastpath_enabled() is before is True
