"""The plan's scale in a ZeRO optimizer, and a window that ends without a loss."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch

from lightning_mp import LossScaling
from lightning_mp.compat.deepspeed import PlanScale
from lightning_mp.numerics.loss_scale import LossScaler
from support.models import Regression
from support.oracles import plan_for
from support.ranks import in_a_process
from support.running import fit

host = pytest.importorskip("deepspeed.runtime.fp16.loss_scaler")

RULE = LossScaling.deepspeed(initial_scale_power=4, loss_scale_window=2, hysteresis=2, at_min="hold")


def _after(rule: LossScaling, overflows: list[bool]) -> LossScaler:
    scaler = LossScaler(rule)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    for overflow in overflows:
        scaler.note_step(optimizer, torch.tensor(float(overflow)))
        scaler.update()
    return scaler


def test_it_tells_the_plans_scale_and_nobody_else_moves_it() -> None:
    scaler = _after(RULE, [])
    scale = PlanScale(scaler)
    assert (scale.cur_scale, scale.loss_scale) == (16.0, 16.0)
    scale.cur_scale = 4.0
    for _ in range(10):
        scale.update_scale(False)
    scale.update_scale(True)
    assert scale.cur_scale == scaler.get_scale() == 16.0
    loss = torch.ones(())
    assert scale.scale_loss(loss) is loss


@pytest.mark.parametrize(("rule", "kind"), [(RULE, "DynamicLossScaler"), (LossScaling.static(8.0), "LossScaler")])
def test_a_checkpoint_holds_a_scaler_of_deepspeeds_with_the_scale(rule: LossScaling, kind: str) -> None:
    scaler = _after(rule, [True, True])
    alone = pickle.loads(pickle.dumps(PlanScale(scaler)))
    assert type(alone) is getattr(host, kind)
    assert alone.cur_scale == scaler.get_scale()
    assert getattr(alone, "scale_window", rule.growth_interval) == rule.growth_interval


class Declines(Regression):
    """No loss comes from the last batch of its second window."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if batch_idx == 3 else super().training_step(batch, batch_idx)


def _declined() -> int:
    plan = plan_for("bf16-mixed")
    with pytest.raises(RuntimeError, match=r"returned None on the last batch of a window.*Return a loss of zero"):
        fit(Declines(), plugins=[plan], strategy="mp_deepspeed_zero2", accumulate_grad_batches=2)
    return plan.applied_steps


@pytest.mark.gloo
@pytest.mark.filterwarnings("ignore:`training_step` returned `None`:UserWarning")
def test_a_window_whose_last_batch_gave_no_loss_is_an_error_not_a_lost_update() -> None:
    assert in_a_process(_declined) == 1
