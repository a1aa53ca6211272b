"""How many steps in a row may be skipped; the host looks only on the earliest step on which the answer can be bad."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_mp.numerics import loss_scale
from lightning_mp.numerics.no_op_scaler import NoOpScaler
from lightning_mp.numerics.scaler import LossScaler
from lightning_mp.numerics.step_counter import StepCounter
from lightning_mp.policy import NonFinite


@dataclass(frozen=True)
class Verdict:
    """Why a run ends; ``at_min``: an overflow where the loss scale can fall no lower."""

    what: str
    at_min: bool = False


BAD_LOSS = Verdict("the loss itself is not finite, which no loss scale can help (nonfinite='raise')")
_AT_MIN = Verdict("overflow at the minimum loss scale (at_min='raise')", at_min=True)


class SkipBudget:
    """The budget of ``nonfinite``, and the floor of the loss scale under ``at_min="raise"``."""

    def __init__(self, rule: NonFinite, scaler: LossScaler | NoOpScaler, steps: StepCounter) -> None:
        self._scaler, self._steps = scaler, steps
        self._allowed = 0 if rule.action == "raise" else rule.max_consecutive
        self._counts = isinstance(scaler, LossScaler) or rule.action != "ignore"  # else nothing is ever skipped
        self._next_look = self._next_floor_look = 0
        #: what was found, kept for whoever acts on it at the end of the batch; ``None`` where the step has to raise
        self.deferred: list[Verdict] | None = None

    def restart(self) -> None:
        """Look again on the next step, whatever was known."""
        self._next_look = self._next_floor_look = self._steps.attempts + 1

    def start_over(self) -> None:
        """The skips so far count no more."""
        self._steps.end_streak()
        self.restart()

    def defer(self, verdict: Verdict) -> bool:
        """Keep the verdict, if somebody acts on it at the end of the batch."""
        if self.deferred is None:
            return False
        self.deferred.append(verdict)
        return True

    def verdict(self) -> Verdict | None:
        """Whether more steps in a row were skipped than are allowed, or the floor is hit where the rule raises then."""
        exceeded = self._exceeded()
        if exceeded is not None:
            return Verdict(exceeded)
        return _AT_MIN if self._floor_hit() else None

    def _exceeded(self) -> str | None:
        if not self._counts or self._steps.attempts < self._next_look:
            return None
        streak = self._steps.streak
        if streak > self._allowed:
            many = "a step" if streak == 1 else f"{streak} steps in a row"
            return f"{many} with non-finite gradients, {self._allowed} allowed"
        self._next_look = self._steps.attempts + self._allowed + 1 - streak
        return None

    def _floor_hit(self) -> bool:
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
