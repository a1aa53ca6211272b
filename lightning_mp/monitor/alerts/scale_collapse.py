"""A loss scale that cannot fall any further while steps are still skipped."""

from __future__ import annotations

from typing import ClassVar

from lightning_mp.monitor.alerts.reading import Reading
from lightning_mp.monitor.alerts.rule import BEYOND_FP16, StepRule
from lightning_mp.monitor.alerts.settings import AlertSettings
from lightning_mp.monitor.alerts.window import Window
from lightning_mp.monitor.events import Event, Kind, Severity

#: a loss scale below it makes gradients smaller than they are and cannot help (torch's scaler has no floor)
USELESS = 1.0
RECENT = 10


class ScaleCollapse(StepRule):
    """Several of the last readings were skips at the scale's floor, or at a scale below one."""

    kind: ClassVar[Kind] = "scale_collapse"
    severity: ClassVar[Severity] = "error"
    state = ("skips",)

    def __init__(self, settings: AlertSettings) -> None:
        super().__init__(settings)
        self.skips = Window(RECENT)

    def judge(self, reading: Reading) -> Event | None:
        scale = reading.loss_scale
        if scale is None:
            return None
        low = reading.scale_at_floor or scale < USELESS
        self.skips.append(float(low and reading.skipped))
        count = int(sum(self.skips))
        if not low or count < self.settings.collapse_skips:
            return None
        return self.event(
            reading.step,
            scale,
            "gradients overflow whatever the scale: weights or activations have left fp16's range",
            f"stop; go back to the last good checkpoint, {BEYOND_FP16}",
            loss_scale=scale,
            skipped_at_floor=count,
            of_readings=len(self.skips),
        )
