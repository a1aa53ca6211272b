"""The plan's scale in a ZeRO optimizer, and the step around it, with the optimizer stood in for."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch

from lightning_mp import LossScaling
from lightning_mp.compat.deepspeed import PlanScale
from lightning_mp.deepspeed.engine import ZeroEngine
from lightning_mp.numerics.loss_scale import LossScaler
from lightning_mp.policy import PrecisionPolicy

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


class _Zero:
    """What the engine touches of a ZeRO optimizer."""

    dtype, clip_grad, cpu_offload = torch.float32, 0.0, False

    def __init__(self) -> None:
        self.optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)

    def reduce_ipg_grads(self) -> None:
        """What sums gradients."""

    def step(self, closure: Any = None) -> None:
        """What the engine's step calls."""


class _DeepSpeed(torch.nn.Module):
    """A DeepSpeedEngine in the midst of a window of accumulation."""

    def is_gradient_accumulation_boundary(self) -> bool:
        return False


def test_a_window_whose_last_batch_gave_no_loss_is_an_error_not_a_lost_update() -> None:
    zero: Any = _Zero()
    scaler = LossScaler()
    engine = ZeroEngine(
        PrecisionPolicy(precision="bf16-mixed"),
        device=torch.device("cpu"),
        scaler=scaler,
        distributed=False,
        global_step=lambda: 0,
    )
    engine.connect(_DeepSpeed(), [zero])
    with pytest.raises(RuntimeError, match=r"returned None on the last batch of a window.*Return a loss of zero"):
        engine.step(zero)
    assert scaler.attempts == 0
