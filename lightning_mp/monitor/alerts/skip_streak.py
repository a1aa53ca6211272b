"""Many optimizer steps in a row that applied nothing."""

from __future__ import annotations

from typing import ClassVar

from lightning_mp.monitor.alerts.reading import Reading
from lightning_mp.monitor.alerts.rule import Rule
from lightning_mp.monitor.alerts.settings import AlertSettings
from lightning_mp.monitor.events import Event, Kind

#: torch's initial scale: above it a scaler is still looking for one that fits (DeepSpeed may begin at 2**32)
SEARCHING = 2.0**16


class SkipStreak(Rule):
    """More skips in a row than a loss scale of 65,536 needs to find its level; those above it are not counted."""

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
        cause, advice = _WITHOUT_SCALE if scale is None else _SCALED
        evidence = {"skips_in_a_row": skips} if scale is None else {"skips_in_a_row": skips, "loss_scale": scale}
        return Event(
            step=reading.step,
            kind=self.kind,
            severity="warning",
            value=float(skips),
            evidence=evidence,
            cause=cause,
            advice=advice,
        )


_SCALED = (
    "gradients overflow at every scale: an activation or a weight is beyond fp16's 65,504, or not finite",
    "see the nonfinite events for the module; pin it to fp32 (pins={...: 'fp32'}) or use 'bf16-mixed'",
)
_WITHOUT_SCALE = (
    "the data, the loss or a weight is not finite",
    "see the nonfinite events for the module and the batch; go back to the last good checkpoint",
)
