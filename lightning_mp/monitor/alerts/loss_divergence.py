"""A loss that goes back up and stays there."""

from __future__ import annotations

from typing import ClassVar

from lightning_mp.monitor.alerts.reading import Reading
from lightning_mp.monitor.alerts.rule import StepRule
from lightning_mp.monitor.alerts.settings import AlertSettings
from lightning_mp.monitor.alerts.window import Window, known, median, sigma
from lightning_mp.monitor.events import Event, Kind, Severity

#: the first losses, whose median is where the run began
FIRST = 5


class LossDivergence(StepRule):
    """Several readings in a row that lose much of the run's progress and lie far above the noise of its lowest level.

    Progress rather than a ratio, because a loss may be negative, and one near zero may grow tenfold for no reason. For
    every reading in the window before that was as high, one more in a row is needed.
    """

    kind: ClassVar[Kind] = "loss_divergence"
    severity: ClassVar[Severity] = "error"
    state = ("first", "losses", "lowest", "spread", "high")
    calm = 50

    def __init__(self, settings: AlertSettings) -> None:
        super().__init__(settings)
        self.first, self.losses = Window(FIRST), Window(settings.divergence_window)
        #: the lowest median of a window, and the standard deviation in it
        self.lowest: float | None = None
        self.spread = 0.0
        #: the high losses in a row, the latest of them
        self.high = Window(settings.divergence_window)

    def judge(self, reading: Reading) -> Event | None:
        loss = known(reading.loss)
        if loss is None:
            return None
        event = None
        if self.lowest is not None and self._is_high(loss, self.lowest):
            event = self._event(reading.step, loss, self.lowest)
        if not self.first.full:
            self.first.append(loss)
        self.losses.append(loss)
        if self.losses.full:
            level = median(self.losses)
            if self.lowest is None or level < self.lowest:
                self.lowest, self.spread = level, sigma(self.losses, level)
        return event

    def _is_high(self, loss: float, lowest: float) -> bool:
        """Whether enough readings in a row are high."""
        rise, progress = loss - lowest, max(0.0, median(self.first) - lowest)
        if rise <= self.settings.divergence_progress * progress:  # nearly always, and cheap to check
            self.high.clear()
            return False
        # the quietest stretch was quiet by chance, too
        far = self.settings.divergence_sigmas * max(self.spread, sigma(self.losses, median(self.losses)))
        if rise <= far / 2:
            self.high.clear()
            return False
        before = list(self.losses)[: max(0, len(self.losses) - len(self.high))]
        self.high.append(loss)
        enough = self.settings.divergence_patience + sum(other >= min(self.high) for other in before)
        return len(self.high) >= enough and sum(self.high) / len(self.high) - lowest > far

    def _event(self, step: int, loss: float, lowest: float) -> Event:
        return self.event(
            step,
            loss,
            "a learning rate that is too high, or weights spoiled by a bad step",
            "go back to the last good checkpoint with a lower learning rate, and clip gradients",
            loss=loss,
            lowest=lowest,
            first=median(self.first),
            readings=len(self.high),
        )
