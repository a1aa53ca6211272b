"""The plan's loss scale where a ZeRO optimizer looks for DeepSpeed's."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, cast

from deepspeed.runtime.fp16 import loss_scaler as host

from lightning_mp.compat.torch import GROWTH_TRACKER
from lightning_mp.numerics.scaler import LossScaler


class PlanScale(host.DynamicLossScaler):
    """Gives a ZeRO optimizer the scale that the backward pass used, and leaves moving it to the plan.

    DeepSpeed's own scaler is updated before gradients are divided, so that a step on which the scale grows is made
    with half of its gradients. A checkpoint holds it as the scaler DeepSpeed would have, from which DeepSpeed alone can
    resume.
    """

    def __init__(self, scaler: LossScaler) -> None:
        self._scaler = scaler
        self._read: float | None = None
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

    @contextmanager
    def read_once(self) -> Generator[None, None, None]:
        """One host read for a whole step, in which ZeRO asks for the scale several times a param group."""
        self._read = self._scaler.get_scale()
        try:
            yield
        finally:
            self._read = None

    @property
    def cur_scale(self) -> float:
        """The scale of the step at hand."""
        return self._scaler.get_scale() if self._read is None else self._read

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
        plain = self._plain()
        return type(plain).__new__, (type(plain),), vars(plain)

    def _plain(self) -> host.LossScalerBase:
        if not self.dynamic:
            return host.LossScaler(cast("Any", self.cur_scale))
        plain = host.DynamicLossScaler(
            self.cur_scale,
            self.scale_window,
            self.min_scale,
            self.delayed_shift,
            self.consecutive_hysteresis,
            self.raise_error_at_min_scale,
        )
        state = self._scaler.state_dict()
        plain.cur_iter = self.cur_iter
        # At its next step DeepSpeed counts (cur_iter - last_overflow_iter) - 1 clean ones, which is one more than now.
        plain.last_overflow_iter = self.cur_iter - state[GROWTH_TRACKER] - 2
        plain.cur_hysteresis = state["hysteresis_left"]
        return plain
