"""The plan's scale in a ZeRO optimizer, and the step around it, with the optimizer stood in for."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch

from lightning_mp import LossScaling
from lightning_mp.engines.zero import ZeroEngine
from lightning_mp.numerics.scaler import LossScaler
from lightning_mp.numerics.step_counter import StepCounter
from lightning_mp.policy import PrecisionPolicy

host = pytest.importorskip("deepspeed.runtime.fp16.loss_scaler")

from lightning_mp.engines.zero_scale import PlanScale  # noqa: E402

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


def test_a_step_reads_the_scale_once() -> None:
    scaler, reads = _after(RULE, []), []
    told = scaler.get_scale
    scaler.get_scale = lambda: reads.append(1) or told()  # type: ignore[method-assign]
    scale = PlanScale(scaler)
    with scale.read_once():
        assert {scale.cur_scale for _ in range(5)} == {16.0}
    assert len(reads) == 1
    scaler.update(2.0)
    assert scale.cur_scale == 2.0


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


def test_a_static_scale_is_saved_as_one() -> None:
    alone = pickle.loads(pickle.dumps(PlanScale(_after(LossScaling.static(64.0), []))))
    assert type(alone) is host.LossScaler
    assert (alone.cur_scale, alone.dynamic) == (64.0, False)


class _Zero:
    """What the engine touches of a ZeRO optimizer."""

    def __init__(self, dtype: torch.dtype = torch.float32, norm: Any = 2.0, clip_grad: float = 0.0) -> None:
        self.dtype, self.clip_grad, self.overflow, self._global_grad_norm = dtype, clip_grad, False, norm
        self.compute_grad_norm, self.check_grad_overflow, self.cpu_offload = norm is not None, False, False
        self.clipped_at: list[float] = []
        self.optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)

    def overlapping_partition_gradients_reduce_epilogue(self) -> None:
        """What sums gradients."""

    def step(self, closure: Any = None) -> None:
        """What the engine's step calls."""

    def refresh_fp32_params(self) -> None:
        """What takes changed weights into the masters."""


class _DeepSpeed(torch.nn.Module):
    """What the engine touches of a DeepSpeedEngine."""

    def __init__(self, zero: _Zero, boundary: bool = True) -> None:
        super().__init__()
        self.zero, self.boundary = zero, boundary

    def is_gradient_accumulation_boundary(self) -> bool:
        return self.boundary

    def step(self) -> None:
        self.zero.clipped_at.append(self.zero.clip_grad)

    def was_step_applied(self) -> bool:
        return not self.zero.overflow

    def get_global_grad_norm(self) -> Any:
        return self.zero._global_grad_norm


def _engine(zero: _Zero, boundary: bool = True) -> ZeroEngine:
    engine = ZeroEngine(
        PrecisionPolicy(precision="bf16-mixed"),
        device=torch.device("cpu"),
        step_counter=StepCounter(),
        scaler=None,
        distributed=False,
        global_step=lambda: 0,
    )
    engine.connect(_DeepSpeed(zero, boundary), [zero])  # type: ignore[list-item]
    return engine


def test_clipping_holds_for_one_step_and_then_is_the_jsons() -> None:
    zero: Any = _Zero(clip_grad=3.0)
    engine = _engine(zero)
    engine.step(zero)
    engine.before_backward(torch.zeros(()), manual=True)
    engine.clip_norm(zero, 0.5)  # as under manual optimization: before the step asks for unscaling
    engine.unscale(zero)
    engine.step(zero)
    engine.step(zero)
    assert zero.clipped_at == [3.0, 0.5, 3.0]


@pytest.mark.parametrize(("dtype", "norm"), [(torch.bfloat16, 2.0), (torch.float32, None), (torch.bfloat16, None)])
def test_gradients_are_always_asked_whether_they_are_finite(dtype: torch.dtype, norm: Any) -> None:
    zero: Any = _Zero(dtype, norm)
    engine = _engine(zero)
    assert zero.check_grad_overflow
    engine.step(zero)
    assert engine.last_norm == norm


def test_a_window_whose_last_batch_gave_no_loss_is_an_error_not_a_lost_update() -> None:
    zero: Any = _Zero()
    engine = _engine(zero, boundary=False)
    with pytest.raises(RuntimeError, match=r"returned None on the last batch of a window.*Return a loss of zero"):
        engine.step(zero)
    assert zero.clipped_at == []
    assert engine.step_counter.attempts == 0


def test_clipping_by_value_is_refused() -> None:
    zero: Any = _Zero()
    with pytest.raises(RuntimeError, match="Allowed: 'norm'"):
        _engine(zero).clip_value(zero, 1.0)
