"""How many steps in a row may be skipped; the host looks only on the earliest step on which the answer can be bad."""

from __future__ import annotations

from lightning_mp.numerics import loss_scale
from lightning_mp.numerics.no_op_scaler import NoOpScaler
from lightning_mp.numerics.scaler import LossScaler
from lightning_mp.numerics.step_counter import StepCounter
from lightning_mp.policy import NonFinite


class SkipBudget:
    """The budget of ``nonfinite``, and the floor of the loss scale under ``at_min="raise"``."""

    def __init__(self, rule: NonFinite, scaler: LossScaler | NoOpScaler, steps: StepCounter) -> None:
        self._scaler, self._steps = scaler, steps
        self._allowed = 0 if rule.action == "raise" else rule.max_consecutive
        self._counts = isinstance(scaler, LossScaler) or rule.action != "ignore"  # else nothing is ever skipped
        self._next_look = self._next_floor_look = 0

    def restart(self) -> None:
        """Look again on the next step, whatever was known."""
        self._next_look = self._next_floor_look = self._steps.attempts + 1

    def exceeded(self) -> str | None:
        """What to say if more steps in a row were skipped than are allowed."""
        if not self._counts or self._steps.attempts < self._next_look:
            return None
        streak = self._steps.streak
        if streak > self._allowed:
            many = "a step" if streak == 1 else f"{streak} steps in a row"
            return f"{many} with non-finite gradients, {self._allowed} allowed"
        self._next_look = self._steps.attempts + self._allowed + 1 - streak
        return None

    def floor_hit(self) -> bool:
        """Whether the last update met an overflow at the minimum loss scale, where the rule says to raise then."""
        scaler = self._scaler
        if not isinstance(scaler, LossScaler) or scaler.config.at_min != "raise":
            return False
        if self._steps.attempts < self._next_floor_look:
            return False
        if scaler.overflowed_at_min:
            return True
        self._next_floor_look = (
            self._steps.attempts + loss_scale.backoffs_to_floor(scaler.config, scaler.get_scale()) + 1
        )
        return False
