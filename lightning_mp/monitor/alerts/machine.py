"""The machine: memory that keeps growing, and a run that has become slow."""

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
#: an earlier reading counts as equally slow up to this many times the fastest of the slow readings in a row. Measured
#: on a machine with five times more work than cores: it separates nearly all chance from what lasts
AS_SLOW = 2.0


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


class ThroughputDrop(StepRule):
    """Several readings in a row far below the best level so far, which together have cost noticeable time.

    In tokens per second where they are known, else in samples per second. On a busy machine single steps are slow: for
    every reading in the window before that was as slow, one more in a row is needed.
    """

    kind: ClassVar[Kind] = "throughput_drop"
    state = ("seen", "best", "rates", "slow", "fastest", "lost")
    calm = 100

    def __init__(self, settings: AlertSettings) -> None:
        super().__init__(settings)
        self.seen = 0
        #: the largest median of a window
        self.best = 0.0
        #: the slow readings in a row: how many, the fastest of them, and the seconds they have cost
        self.slow, self.fastest, self.lost = 0, 0.0, 0.0
        self.rates = Window(settings.throughput_window)

    def judge(self, reading: Reading) -> Event | None:
        rate = known(reading.samples_per_s if reading.tokens_per_s is None else reading.tokens_per_s)
        if rate is None:
            return None
        self.seen += 1
        if self.seen <= self.settings.throughput_warmup:
            return None
        event = self._event(reading, rate)
        self.rates.append(rate)
        if self.rates.full:
            self.best = max(self.best, median(self.rates))
        return event

    def _event(self, reading: Reading, rate: float) -> Event | None:
        if rate >= self.settings.throughput_ratio * self.best:
            self.slow, self.fastest, self.lost = 0, 0.0, 0.0
            return None
        before = list(self.rates)[: len(self.rates) - self.slow]
        self.slow, self.fastest = self.slow + 1, max(self.fastest, rate)
        seconds = known(reading.seconds)
        # a time that is not known counts as long enough
        self.lost += self.settings.throughput_seconds if seconds is None else seconds * (1 - rate / self.best)
        enough = self.settings.throughput_patience + sum(other <= AS_SLOW * self.fastest for other in before)
        if self.slow < enough or self.lost < self.settings.throughput_seconds:
            return None
        unit = "samples_per_s" if reading.tokens_per_s is None else "tokens_per_s"
        return self.event(
            reading.step,
            rate,
            "slow data loading, another job on the machine, or a device that throttles",
            "raise num_workers or check the storage; look at the device's utilisation and clocks",
            **{unit: rate},
            before=self.best,
            ratio=rate / self.best,
            readings=self.slow,
        )
