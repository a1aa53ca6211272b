"""The plan's loss scale where a ZeRO optimizer looks for DeepSpeed's."""

from __future__ import annotations

from typing import Any

from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

from lightning_mp.numerics.scaler import LossScaler


class PlanScale(DynamicLossScaler):
    """Tells a ZeRO optimizer the scale that the backward pass used, and leaves moving it to the plan.

    DeepSpeed's own scaler is updated before gradients are divided, so that a step on which the scale grows is made
    with half of its gradients. A checkpoint holds it as DeepSpeed's ``DynamicLossScaler``, which DeepSpeed alone can
    go on from.
    """

    def __init__(self, scaler: LossScaler) -> None:
        self._scaler = scaler
        rule = scaler.config
        super().__init__(
            init_scale=rule.init_scale,
            scale_window=rule.growth_interval,
            min_scale=rule.min_scale,
            delayed_shift=rule.hysteresis,
            consecutive_hysteresis=rule.consecutive_hysteresis,
            raise_error_at_min_scale=rule.at_min == "raise",
        )
        self.dynamic = rule.dynamic

    @property
    def cur_scale(self) -> float:
        """The scale of the step at hand."""
        return self._scaler.get_scale()

    @cur_scale.setter
    def cur_scale(self, value: float) -> None:
        """The plan's own rule moves it."""

    def scale_loss(self, loss: Any) -> Any:
        """The loss as it is: the plan has scaled it."""
        return loss

    def update_scale(self, overflow: bool) -> None:
        """Count; the plan adjusts once the step is over."""
        self.cur_iter += 1

    def __reduce__(self) -> Any:
        plain = DynamicLossScaler(
            self.cur_scale,
            self.scale_window,
            self.min_scale,
            self.delayed_shift,
            self.consecutive_hysteresis,
            self.raise_error_at_min_scale,
        )
        return DynamicLossScaler.__new__, (DynamicLossScaler,), vars(plain)
