"""A gradient norm far above its recent ones."""

from __future__ import annotations

import math
from typing import ClassVar

from lightning_mp.monitor.alerts.reading import Reading
from lightning_mp.monitor.alerts.rule import StepRule
from lightning_mp.monitor.alerts.settings import AlertSettings
from lightning_mp.monitor.alerts.window import Window, known, median, sigma
from lightning_mp.monitor.events import Event, Kind


class GradNormSpike(StepRule):
    """A norm far above the median, as a ratio and in robust standard deviations: either alone is fooled by noise.

    A norm that is small compared with the first ones of the run has to be farther off. The verdict does not change when
    every norm is multiplied by the same number.
    """

    kind: ClassVar[Kind] = "grad_norm_spike"
    state = ("norms", "level")

    def __init__(self, settings: AlertSettings) -> None:
        super().__init__(settings)
        self.norms = Window(settings.spike_window)
        #: the first full window's median
        self.level: float | None = None

    def judge(self, reading: Reading) -> Event | None:
        norm = known(reading.grad_norm)
        if norm is None:
            return None
        event = self._event(reading.step, norm) if self.norms.full else None
        self.norms.append(norm)
        if self.level is None and self.norms.full:
            self.level = median(self.norms)
        return event

    def _event(self, step: int, norm: float) -> Event | None:
        center = median(self.norms)
        spread = sigma(self.norms, center)
        ratio = norm / center if center else math.inf
        sigmas = (norm - center) / spread if spread else math.inf
        harmless = norm < self.settings.spike_level * (self.level or 0.0) and ratio < self.settings.spike_far
        if norm <= center or ratio < self.settings.spike_ratio or sigmas < self.settings.spike_sigmas or harmless:
            return None
        return self.event(
            step,
            norm,
            "a bad batch, or a learning rate that is too high here",
            "look at this batch; clip gradients (gradient_clip_val=1.0); lower the learning rate if it happens again",
            grad_norm=norm,
            median=center,
            ratio=ratio,
            sigmas=sigmas,
            window=len(self.norms),
        )
