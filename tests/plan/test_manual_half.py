"""Manual optimization where the default dtype of the training step is a half one: counts and flags stay fp32."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from torch.optim import AdamW

from lightning_mp import MixedPrecisionPlan, NonFinite
from support.models import Regression, batches
from support.oracles import plan_for
from support.running import fit


class Manual(Regression):
    """One optimizer, stepped by hand; every loss is multiplied by ``factor``."""

    def __init__(self, optimizer: Any, factor: float = 1.0) -> None:
        super().__init__(optimizer)
        self.automatic_optimization = False
        self.factor = factor

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = self.loss(batch)
        self.losses.append(loss.item())
        self.manual_backward(loss * self.factor)
        optimizer.step()


@pytest.mark.parametrize("mode", ["bf16-true", "16-true"])
def test_counts_go_past_what_a_half_number_counts_to(mode: str) -> None:
    """bf16 counts to 256, fp16 to 2,048."""
    plan = MixedPrecisionPlan(mode, nonfinite=NonFinite(max_consecutive=10**6))
    module = Manual(partial(AdamW, lr=1e-2, fused=True), factor=float("nan"))
    fit(module, plugins=[plan], data=batches(rows=300, batch_size=1))
    assert (plan.applied_steps, plan.skipped_steps) == (0, 300)


def test_steps_through_the_scaler_itself_are_counted() -> None:
    class Raw(Manual):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers(use_pl_optimizer=False)
            scaler = self.trainer.precision_plugin.scaler
            optimizer.zero_grad()
            factor = float("inf") if batch_idx in (2, 5) else 1.0
            scaler.scale(self.loss(batch) * factor).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            self.losses.append(float(self.trainer.precision_plugin.step_skipped))

    plan = plan_for("16-mixed")
    before = plan.scaler.get_scale()
    module = Raw(partial(AdamW, lr=1e-2))
    fit(module, plugins=[plan])
    assert (plan.applied_steps, plan.skipped_steps) == (6, 2)
    assert module.losses == [0, 0, 1, 0, 0, 1, 0, 0]
    assert plan.scaler.get_scale() == before / 4
