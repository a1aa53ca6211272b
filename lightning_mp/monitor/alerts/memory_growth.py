"""Memory that keeps growing."""

from __future__ import annotations

from itertools import pairwise
from typing import ClassVar

from lightning_mp.monitor.alerts.reading import Reading
from lightning_mp.monitor.alerts.rule import StepRule
from lightning_mp.monitor.alerts.settings import AlertSettings
from lightning_mp.monitor.alerts.window import Window, known, median, sigma
from lightning_mp.monitor.events import Event, Kind

#: pieces of the window whose medians all have to rise
PIECES = 8
#: noise orders them so once in 8! windows: the rise has to be this many of its standard deviations too
NOISE = 2.0


class MemoryGrowth(StepRule):
    """The median of every piece of the window lies above the one before, and the growth is large enough to matter."""

    kind: ClassVar[Kind] = "memory_growth"
    state = ("seen", "steps", "memory")

    def __init__(self, settings: AlertSettings) -> None:
        super().__init__(settings)
        self.seen = 0
        self.steps, self.memory = Window(settings.memory_window), Window(settings.memory_window)

    def judge(self, reading: Reading) -> Event | None:
        memory = known(reading.memory_gib)
        if memory is None:
            return None
        self.seen += 1
        if self.seen <= self.settings.memory_warmup:
            return None
        self.memory.append(memory)
        self.steps.append(reading.step)
        # in most runs memory does not grow, and the check costs nothing
        return self._event(reading.step, memory) if self.memory.full and memory > self.memory[0] else None

    def _event(self, step: int, memory: float) -> Event | None:
        parts = self.memory.parts(PIECES)
        levels = [median(part) for part in parts]
        grown = levels[-1] - levels[0]
        spread = median([sigma(part, level) for part, level in zip(parts, levels, strict=True)])
        worth = max(self.settings.memory_gib, self.settings.memory_ratio * levels[0], NOISE * spread)
        if grown < worth or not all(before < after for before, after in pairwise(levels)):
            return None
        steps = step - int(self.steps[0])
        return self.event(
            step,
            memory,
            "something is kept from step to step: losses with their graph, outputs in a list, a growing cache",
            "append loss.detach() or loss.item(), not loss; clear lists at the end of an epoch",
            memory_gib=memory,
            before=levels[0],
            gib_per_1000_steps=1000 * grown / steps,
        )
