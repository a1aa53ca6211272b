"""Operands of FP8 products that lose too much, or whose scale jumps; each event names the layer and the role."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, ClassVar

from lightning_mp.monitor.alerts.reading import Operand, Reading
from lightning_mp.monitor.alerts.rule import Rule
from lightning_mp.monitor.alerts.settings import AlertSettings
from lightning_mp.monitor.alerts.window import Window, known, median, sigma
from lightning_mp.monitor.events import Event, Kind

Place = tuple[str, str]


class OperandRule(Rule):
    """One condition on each operand; of several in which it begins at once, each gets its event, one a reading."""

    def __init__(self, settings: AlertSettings) -> None:
        super().__init__(settings)
        self.windows: dict[Place, Window] = {}
        #: readings before the next event of a place
        self.resting: dict[Place, int] = {}

    def begins(self, reading: Reading) -> Event | None:
        """The event of the first operand in which the condition begins."""
        event: Event | None = None
        for place in self._known(reading):
            found = self.of(place, reading)
            rests = self.resting.get(place, 0)
            if found is None:
                self.resting[place] = max(0, rests - 1)
            elif rests:
                self.resting[place] = self.calm
            elif event is None:
                self.resting[place], event = self.calm, found
        return event

    @abstractmethod
    def of(self, place: Place, reading: Reading) -> Event | None:
        """Take an operand's numbers in; an event if the condition holds in it."""

    def _known(self, reading: Reading) -> Iterable[Place]:
        return (place for place, one in reading.fp8.items() if known(one.amax) and known(one.scale))

    def named(self, place: Place, event: Event, operand: Operand) -> Event:
        """The event of an operand: which layer's, and which."""
        layer, role = place
        numbers = {"role": role, **event.evidence, "amax": operand.amax, "scale": operand.scale}
        return replace(event, module=layer, evidence=numbers, advice=event.advice.replace("LAYER", repr(layer)))

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs, as plain values."""
        windows = [[*place, list(window)] for place, window in self.windows.items()]
        resting = [[*place, count] for place, count in self.resting.items() if count]
        return {**super().state_dict(), "windows": windows, "resting": resting}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from ``state``."""
        super().load_state_dict(state)
        self.windows = {(layer, role): self.window(values) for layer, role, values in state.get("windows", ())}
        self.resting = {(layer, role): count for layer, role, count in state.get("resting", ())}

    @abstractmethod
    def window(self, values: Iterable[float] = ()) -> Window:
        """What is kept of an operand."""


class FP8Underflow(OperandRule):
    """Several readings in a row, more of an operand's values were flushed to zero than training bears."""

    kind: ClassVar[Kind] = "fp8_underflow"

    def window(self, values: Iterable[float] = ()) -> Window:
        """The last shares."""
        return Window(self.settings.underflow_patience, values)

    def of(self, place: Place, reading: Reading) -> Event | None:
        operand = reading.fp8[place]
        shares = self.windows.setdefault(place, self.window())
        shares.append(operand.flushed)
        lowest = min(shares)
        if len(shares) < self.settings.underflow_patience or lowest < self.settings.underflow_share:
            return None
        event = self.event(reading.step, operand.flushed, *_UNDERFLOW, flushed=operand.flushed, readings=len(shares))
        return self.named(place, event, operand)


class OperandScaleJump(OperandRule):
    """A scale far from the median of the last ones."""

    kind: ClassVar[Kind] = "scale_jump"

    @classmethod
    def key(cls) -> str:
        """The loss scale's rule has the kind's name."""
        return f"fp8_{cls.kind}"

    def window(self, values: Iterable[float] = ()) -> Window:
        """The logarithms of the last scales."""
        return Window(self.settings.jump_steps, values)

    def of(self, place: Place, reading: Reading) -> Event | None:
        operand = reading.fp8[place]
        powers = self.windows.setdefault(place, self.window())
        power = math.log2(operand.scale)
        full, before = powers.full, median(powers) if powers else power
        usual = sigma(powers, before) if powers else 0.0
        powers.append(power)
        # A gradient's scale rises without limit where a model has learned its data: that is no fault.
        far = before - power if place[1] == "gradient" else abs(power - before)
        if not full or far < max(math.log2(self.settings.jump_total), self.settings.jump_sigmas * usual):
            return None
        event = self.event(
            reading.step,
            operand.scale,
            *(_DROP if power < before else _RISE),
            before=2.0**before,
            factor=2.0 ** (power - before),
            steps=len(powers),
        )
        return self.named(place, event, operand)


_UNDERFLOW = (
    "a few of its values are so large that the scale they need leaves nothing of the others",
    "leave it in bf16: skip=('lm_head', LAYER) in FP8, or the action 'fallback'; recipe='rowwise' has a scale a row",
)
_DROP = (
    "that operand has grown: an outlier in the batch, or an activation that runs away; its other values lose precision",
    "look at the batch and the layers before; clip gradients, or leave it in bf16: skip=('lm_head', LAYER) in FP8",
)
_RISE = (
    "that operand has collapsed: a layer before it is dead, or was reset",
    "look at the layers before it and at what has changed their weights: a load, a learning rate",
)
