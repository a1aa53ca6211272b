"""A loss that goes back up and stays there."""

from __future__ import annotations

from typing import ClassVar

from lightning_mp.monitor.alerts.reading import Reading
from lightning_mp.monitor.alerts.rule import Rule
from lightning_mp.monitor.alerts.settings import AlertSettings
from lightning_mp.monitor.alerts.window import Window, known, median, sigma
from lightning_mp.monitor.events import Event, Kind

#: the first losses, whose median is where the run began
FIRST = 5


class LossDivergence(Rule):
    """Readings in a row that lose much of the run's progress and lie far above the noise of its lowest level.

    Progress, not a ratio: a loss may be negative, and one near zero multiplies by ten for no reason. Where losses are
    as high now and then, every such reading in the window before asks for one more in a row.
    """

    kind: ClassVar[Kind] = "loss_divergence"
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
        """Whether there are enough high ones in a row."""
        rise, progress = loss - lowest, max(0.0, median(self.first) - lowest)
        if rise <= self.settings.divergence_progress * progress:  # nearly always, and cheap to tell
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
        return Event(
            step=step,
            kind=self.kind,
            severity="error",
            value=loss,
            evidence={"loss": loss, "lowest": lowest, "first": median(self.first), "readings": len(self.high)},
            cause="a learning rate that is too high, or weights spoiled by a bad step",
            advice="go back to the last good checkpoint with a lower learning rate, and clip gradients",
        )
