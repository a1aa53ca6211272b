"""Many optimizer steps in a row that applied nothing."""

from __future__ import annotations

from typing import ClassVar

from lightning_mp.monitor.alerts.reading import Reading
from lightning_mp.monitor.alerts.rule import BEYOND_FP16, StepRule
from lightning_mp.monitor.alerts.settings import AlertSettings
from lightning_mp.monitor.events import Event, Kind

#: torch's initial scale; above it a scaler is still searching for one that fits (DeepSpeed may start at 2**32)
SEARCHING = 2.0**16


class SkipStreak(StepRule):
    """More skips in a row than it takes to find a scale from 65,536 on; skips at higher scales are not counted."""

    kind: ClassVar[Kind] = "skip_streak"
    state = ("searching",)
    calm = 1

    def __init__(self, settings: AlertSettings) -> None:
        super().__init__(settings)
        #: how many of the skips in a row were made while the scale was still above
        self.searching = 0

    def judge(self, reading: Reading) -> Event | None:
        scale, skips = reading.loss_scale, reading.skips_in_a_row
        if scale is not None and scale >= SEARCHING:
            self.searching = skips
        self.searching = min(self.searching, skips)
        if skips - self.searching < self.settings.streak_skips:
            return None
        scaled = {} if scale is None else {"loss_scale": scale}
        advice = _WITHOUT_SCALE if scale is None else _SCALED
        return self.event(reading.step, float(skips), *advice, skips_in_a_row=skips, **scaled)


_SCALED = (
    "gradients overflow at every scale: an activation or a weight is beyond fp16's 65,504, or not finite",
    BEYOND_FP16,
)
_WITHOUT_SCALE = (
    "the data, the loss or a weight is not finite",
    "look at the batch and the module that the nonfinite events name; go back to the last good checkpoint",
)
