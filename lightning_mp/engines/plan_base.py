"""What monitors may read of a ``MixedPrecisionPlan``, which lives on a floor above theirs."""

from __future__ import annotations

from torch import Tensor

from lightning_mp.engines.base import StepEngine
from lightning_mp.numerics.scaler import LossScaler
from lightning_mp.numerics.step_counter import StepCounter
from lightning_mp.policy import PrecisionPolicy


class PlanBase:
    """The base class by which a precision plugin is known to be a plan."""

    policy: PrecisionPolicy
    #: counts of applied and skipped steps
    step_counter: StepCounter
    #: ``None`` in a mode without loss scaling
    scaler: LossScaler | None
    _engine: StepEngine | None = None

    @property
    def step_skipped(self) -> bool:
        """Whether the last optimizer step was skipped; the first question after a step waits for the device."""
        return self.step_counter.step_skipped

    @property
    def skipped_steps(self) -> int:
        """How many optimizer steps were skipped since the run began."""
        return self.step_counter.skipped_steps

    @property
    def applied_steps(self) -> int:
        """How many optimizer steps were applied since the run began."""
        return self.step_counter.applied_steps

    @property
    def engine(self) -> StepEngine | None:
        """What carries the plan out on the strategy at hand, while a run lasts."""
        return self._engine

    @property
    def last_grad_norm(self) -> Tensor | None:
        """The global gradient norm of the last clipping by norm, before it: an fp32 scalar on the device."""
        return None if self._engine is None else self._engine.last_norm
