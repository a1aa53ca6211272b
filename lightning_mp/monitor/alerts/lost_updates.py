"""Half-precision weights that most updates no longer move."""

from __future__ import annotations

from typing import ClassVar

from lightning_mp.monitor.alerts.reading import Reading
from lightning_mp.monitor.alerts.rule import StepRule
from lightning_mp.monitor.alerts.settings import AlertSettings
from lightning_mp.monitor.alerts.window import Window, known, median
from lightning_mp.monitor.events import Event, Kind


class LostUpdates(StepRule):
    """Over a window, the larger part of the updates was rounded away."""

    kind: ClassVar[Kind] = "lost_updates"
    state = ("shares",)

    def __init__(self, settings: AlertSettings) -> None:
        super().__init__(settings)
        self.shares = Window(settings.lost_window)

    def judge(self, reading: Reading) -> Event | None:
        share = known(reading.lost_updates)
        if share is None:
            return None
        self.shares.append(share)
        usual = median(self.shares)
        if not self.shares.full or usual < self.settings.lost_share:
            return None
        return self.event(
            reading.step,
            usual,
            "weights are stored in half precision alone, where an update below half of the last bit changes nothing",
            "use the mixed mode, which keeps fp32 weights, or an optimizer that rounds stochastically: torchao's "
            "_AdamW(bf16_stochastic_round=True); a larger learning rate loses less",
            lost_updates=usual,
            readings=len(self.shares),
            **({} if reading.lr is None else {"lr": reading.lr}),
        )
