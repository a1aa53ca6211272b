"""The loss scale: one that cannot fall any further, one that changes too fast, and steps that are skipped in a row."""

from __future__ import annotations

import math
from typing import ClassVar

from lightning_mp.monitor.alerts.reading import Reading
from lightning_mp.monitor.alerts.rule import BEYOND_FP16, StepRule
from lightning_mp.monitor.alerts.settings import AlertSettings
from lightning_mp.monitor.alerts.window import Window, known
from lightning_mp.monitor.events import Event, Kind, Severity

#: a loss scale below it makes gradients smaller than they are and cannot help (torch's scaler has no floor)
USELESS = 1.0
RECENT = 10
#: torch's initial scale; above it a scaler is still searching for one that fits (DeepSpeed may start at 2**32)
SEARCHING = 2.0**16


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
