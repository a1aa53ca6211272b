"""The plan's scale in a ZeRO optimizer, and the step around it, with the optimizer stood in for."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch

from lightning_mp import LossScaling
from lightning_mp.compat.deepspeed import PlanScale
from lightning_mp.engines.zero import ZeroEngine
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


@pytest.mark.parametrize(
    "before", [[], [False], [True], [False, False, True, False], [True, True, False, False, False]]
)
def test_deepspeed_alone_goes_on_from_a_checkpoint_as_the_plan_does(before: list[bool], monkeypatch: Any) -> None:
    monkeypatch.setattr(host.dist, "get_rank", lambda: 0)
    after = [False, True, False, False, False, True, True, False, False, False, False, False]
    scale = PlanScale(_after(RULE, before))
    for overflow in before:
        scale.update_scale(overflow)
    alone = pickle.loads(pickle.dumps(scale))
    assert type(alone) is host.DynamicLossScaler
    assert alone.cur_scale == scale.cur_scale
    for step, overflow in enumerate(after):
        alone.update_scale(overflow)
        assert alone.cur_scale == _after(RULE, before + after[: step + 1]).get_scale()


class _Zero:
    """What the engine touches of a ZeRO optimizer."""

    dtype, clip_grad, cpu_offload = torch.float32, 0.0, False

    def __init__(self) -> None:
        self.optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)

    def overlapping_partition_gradients_reduce_epilogue(self) -> None:
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
