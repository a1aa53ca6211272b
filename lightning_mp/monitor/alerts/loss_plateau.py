"""A loss that has stopped falling although the run has not converged."""

from __future__ import annotations

import math
from typing import ClassVar

from lightning_mp.monitor.alerts.reading import Reading
from lightning_mp.monitor.alerts.rule import StepRule
from lightning_mp.monitor.alerts.settings import AlertSettings
from lightning_mp.monitor.alerts.window import Window, known, median, sigma
from lightning_mp.monitor.events import Event, Kind

#: the first losses, whose median is where the run began
FIRST = 5
#: of a normal sample's median: sqrt(pi / 2) times that of its mean
MEDIAN_ERROR = math.sqrt(math.pi / 2)
#: half the distance between fp32 numbers, relatively: no weight moves by less
FP32_ROUNDING = 2.0**-24
#: a learning rate that changes by more than this within the window is a schedule at work
STEADY = 1.01


class LossPlateau(StepRule):
    """Neither loss nor gradient norm fell within the window, for a reason other than convergence.

    A converged run, at the noise floor of its data, looks the same in loss and norm. It is told apart by its history:
    its loss fell before, and its weights still move.
    """

    kind: ClassVar[Kind] = "loss_plateau"
    state = ("first", "losses", "norms", "ratios", "sizes", "rates", "peak")
    calm = 100

    def __init__(self, settings: AlertSettings) -> None:
        super().__init__(settings)
        self.first = Window(FIRST)
        size = settings.plateau_window
        self.losses, self.norms, self.ratios = Window(size), Window(size), Window(size)
        self.sizes, self.rates = Window(size), Window(size)
        #: the largest median update ratio of half a window
        self.peak = 0.0

    def judge(self, reading: Reading) -> Event | None:
        loss = known(reading.loss)
        if loss is None:
            return None
        if not self.first.full:
            self.first.append(loss)
        self.losses.append(loss)
        given = reading.grad_norm, reading.update_ratio, reading.param_norm, reading.lr
        for window, value in zip((self.norms, self.ratios, self.sizes, self.rates), given, strict=True):
            number = known(value)
            if number is not None:
                window.append(number)
        if not self.losses.full:
            return None
        if self.ratios.full:
            self.peak = max(self.peak, median(self.ratios.parts(2)[1]))
        why = self._why()  # the cheapest check first
        if why is None or self._norm_falls() or not self._flat():
            return None
        return self._event(reading, loss, why)

    def _flat(self) -> bool:
        earlier, later = self.losses.parts(2)
        before, after = median(earlier), median(later)
        errors = [sigma(part, level) / math.sqrt(len(part)) for part, level in ((earlier, before), (later, after))]
        return before - after <= self.settings.plateau_sigmas * MEDIAN_ERROR * math.hypot(*errors)

    def _norm_falls(self) -> bool:
        if not self.norms.full:
            return False
        earlier, later = map(median, self.norms.parts(2))
        return later < self.settings.plateau_falling * earlier

    def _why(self) -> tuple[str, str] | None:
        """Cause and advice."""
        if self.norms.full and self.norms[-1] == 0 and median(self.norms) == 0:
            return "gradients are zero: the loss is cut off from the weights", (
                "look for detach(), no_grad, dead activations or a loss multiplied by zero"
            )
        if self._still() and not (self.rates.full and max(self.rates) > STEADY * min(self.rates)):
            if self.rates and self.rates[-1] == 0:
                return "the learning rate is 0", "look at the schedule's length and its last value"
            return "weights do not move: the learning rate is far too small, or updates round to nothing", (
                "raise the learning rate; keep fp32 weights ('bf16-mixed', not 'bf16-true'); "
                "check that the optimizer was given these parameters"
            )
        start = median(self.first)
        rising = self.rates.full and self.rates[-1] > STEADY * self.rates[0]
        if not rising and start - median(self.losses) < self.settings.plateau_progress * abs(start):
            return "nothing was learned: inputs and targets do not match, or the learning rate is wrong", (
                "check that one batch can be overfitted, the order of data and labels, and the learning rate"
            )
        return None

    def _still(self) -> bool:
        if self.sizes.full and max(self.sizes) - min(self.sizes) <= FP32_ROUNDING * max(self.sizes):
            return True
        if not self.ratios.full:
            return False
        return median(self.ratios) <= max(FP32_ROUNDING, self.settings.plateau_still * self.peak)

    def _event(self, reading: Reading, loss: float, why: tuple[str, str]) -> Event:
        evidence: dict[str, float] = {"loss": median(self.losses), "first": median(self.first)}
        for name, window in (("grad_norm", self.norms), ("update_ratio", self.ratios), ("lr", self.rates)):
            if window:
                evidence[name] = median(window)
        return self.event(reading.step, loss, *why, **evidence, window=len(self.losses))
