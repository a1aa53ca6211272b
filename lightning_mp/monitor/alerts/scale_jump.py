"""A loss scale that changes faster than its update rule allows."""

from __future__ import annotations

import math
from typing import ClassVar

from lightning_mp.monitor.alerts.reading import Reading
from lightning_mp.monitor.alerts.rule import StepRule
from lightning_mp.monitor.alerts.settings import AlertSettings
from lightning_mp.monitor.alerts.window import Window, known
from lightning_mp.monitor.events import Event, Kind


class ScaleJump(StepRule):
    """A change that halving or doubling once a step does not explain, or a long one within few steps.

    A sudden drop precedes non-finite values, a sudden rise follows gradients that underflowed. Steps count from the
    first applied one, and long changes once the scale has not moved for ``jump_steps`` steps: before that the scaler is
    still searching for a scale.
    """

    kind: ClassVar[Kind] = "scale_jump"
    state = ("steps", "powers", "moved", "settled")

    def __init__(self, settings: AlertSettings) -> None:
        super().__init__(settings)
        # at most one reading a step
        self.steps, self.powers = Window(settings.jump_steps + 1), Window(settings.jump_steps + 1)
        #: the step at which the scale last changed, and whether it has ever stayed the same for long enough
        self.moved, self.settled = 0, False

    def judge(self, reading: Reading) -> Event | None:
        scale = known(reading.loss_scale)
        if scale is None or scale <= 0 or (reading.skipped and not self.powers):
            return None
        power, step = math.log2(scale), reading.step
        event = self._event(step, power) if self.steps else None
        if not self.steps or power != self.powers[-1]:
            self.moved = step
        self.settled = self.settled or step - self.moved >= self.settings.jump_steps
        self.steps.append(step)
        self.powers.append(power)
        while not step - self.settings.jump_steps < self.steps[0] <= step:
            self.steps.popleft()
            self.powers.popleft()
        return event

    def _event(self, step: int, power: float) -> Event | None:
        last, apart = self.powers[-1], max(1, step - int(self.steps[-1]))
        far = max(self.powers, key=lambda before: abs(power - before))
        since = step - int(self.steps[self.powers.index(far)])
        long = self.settled and 0 < since <= self.settings.jump_steps
        if abs(power - last) >= apart - 1 + math.log2(self.settings.jump_factor):
            before, steps = last, apart
        elif long and abs(power - far) >= math.log2(self.settings.jump_total):
            before, steps = far, since
        else:
            return None
        factor = 2.0 ** (power - before)
        return self.event(
            step,
            2.0**power,
            *(_DROP if power < before else _RISE),
            loss_scale=2.0**power,
            before=2.0**before,
            factor=factor,
            steps=steps,
        )


_DROP = (
    "gradients approach fp16's largest number and will overflow soon, or the scale was set from outside",
    "lower the learning rate or clip gradients; the nonfinite events name the module that overflows first",
)
_RISE = (
    "the scale was set from outside or grows too often; small gradients underflowed before that",
    "check what sets the scale: a resumed checkpoint, growth_interval, growth_factor",
)
