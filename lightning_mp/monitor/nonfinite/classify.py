"""Which non-finite steps get an event, and which of them need a diagnosis."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from lightning_mp.monitor.alerts import Reading
from lightning_mp.monitor.events import Event
from lightning_mp.monitor.nonfinite import messages
from lightning_mp.monitor.nonfinite.replay import Diagnosis

#: A scale that is being searched for overflows this many times in a row at most, from torch's 65,536 on (measured on
#: small GPT-2 and MLP runs), and is found above the scale which that leads to.
SEARCH_SKIPS, SEARCH_SCALE = 5, 2.0**10
#: Once so many steps were applied the scale is known; so many overflows in a row are then no search any more.
FOUND_AFTER, FOUND_SKIPS = 10, 3


@dataclass(frozen=True, slots=True)
class NonFiniteStep:
    """A non-finite step that gets an event; an ``alert`` also gets rank, module and parameter."""

    step: int
    bad_loss: bool
    alert: bool
    in_a_row: int
    scale: float | None
    applied: bool

    def event(self, diagnosis: Diagnosis, *, batch_idx: int, under_plan: bool) -> Event:
        """The event, with the diagnosis, and advice for a run with or without a plan."""
        if not self.alert:
            assert self.scale is not None, "only a loss scale makes an overflow ordinary"
            return messages.overflow_event(diagnosis, step=self.step, scale=self.scale)
        event = messages.bad_step_event(
            diagnosis,
            step=self.step,
            bad_loss=self.bad_loss,
            action="log",
            in_a_row=self.in_a_row,
            allowed=0,
            scale=self.scale,
            saved=None,
            under_plan=under_plan,
        )
        evidence = {"batch_idx": batch_idx, **event.evidence, "bad_steps_in_a_row": self.in_a_row}
        for name in ("allowed", "skips_in_a_row"):  # the guard's budget
            evidence.pop(name, None)
        return replace(event, severity="error" if self.applied else "warning", evidence=evidence)


class NonFiniteClassifier:
    """Tells ordinary overflows from problems.

    Under loss scaling an overflow with a finite loss is ordinary until the scale can fall no lower or more come in a
    row than the search for a scale needs. A problem that lasts is reported once.
    """

    def __init__(self) -> None:
        self._in_a_row = self._applied = 0
        self._reported = False

    def look(self, reading: Reading, *, changed: bool = False) -> NonFiniteStep | None:
        """The step, if it is non-finite and not reported yet; ``changed``: its gradients became so once measured."""
        bad_loss = reading.loss is not None and not math.isfinite(reading.loss)
        bad_gradient = reading.grad_norm is not None and not math.isfinite(reading.grad_norm)
        if not (bad_loss or bad_gradient or changed):
            self._applied += not reading.skipped
            self._in_a_row, self._reported = 0, False
            return None
        self._in_a_row = max(self._in_a_row + 1, reading.skips_in_a_row)
        alert = (
            bad_loss
            or changed
            or reading.loss_scale is None
            or reading.scale_at_floor
            or self._too_many(reading.loss_scale)
        )
        if alert and self._reported:
            return None
        self._reported = alert
        return NonFiniteStep(reading.step, bad_loss, alert, self._in_a_row, reading.loss_scale, not reading.skipped)

    def _too_many(self, scale: float) -> bool:
        if self._applied >= FOUND_AFTER:
            return self._in_a_row >= FOUND_SKIPS
        return self._in_a_row > SEARCH_SKIPS and scale <= SEARCH_SCALE
