"""The base of every rule: a state machine over readings that reports a condition once, when it begins."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

from lightning_mp.monitor.alerts.reading import Reading
from lightning_mp.monitor.alerts.settings import AlertSettings
from lightning_mp.monitor.alerts.window import Window
from lightning_mp.monitor.events import Event, Kind, Severity

#: for an overflow that no loss scale can help; ``{pinned}`` is filled in by what the run has
BEYOND_FP16 = "pin the module that the nonfinite events name: {pinned}; or use 'bf16-mixed', without a loss scale"


class Rule(ABC):
    """One condition. An event is made when it begins, and not again before ``calm`` readings without it.

    ``state`` names the attributes that a resumed run needs: numbers, flags, or a :class:`Window`.
    """

    kind: ClassVar[Kind]
    state: ClassVar[tuple[str, ...]] = ()
    #: what every rule of its sort keeps besides
    counts: ClassVar[tuple[str, ...]] = ("judged",)
    severity: ClassVar[Severity] = "warning"
    #: readings without the condition before the next event
    calm: ClassVar[int] = 10

    def __init__(self, settings: AlertSettings) -> None:
        self.settings = settings
        #: the step judged last, so that no step is judged twice
        self.judged: int | None = None

    def look(self, reading: Reading) -> Event | None:
        """The event of a condition that begins in this reading."""
        if reading.step == self.judged:
            return None
        self.judged = reading.step
        return self.begins(reading)

    @abstractmethod
    def begins(self, reading: Reading) -> Event | None:
        """Take a reading in, each step's once; an event where the condition begins in it."""

    def event(self, step: int, value: float, cause: str, advice: str, **evidence: float) -> Event:
        """The event of this rule's condition; ``{pinned}`` in the advice is how modules are pinned in this run."""
        return Event(
            step=step,
            kind=self.kind,
            severity=self.severity,
            value=value,
            evidence=evidence,
            cause=cause,
            advice=advice,
        )

    @classmethod
    def key(cls) -> str:
        """What its state is kept under."""
        return cls.kind

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs, as plain values."""
        values = {name: getattr(self, name) for name in (*self.counts, *self.state)}
        return {name: list(value) if isinstance(value, Window) else value for name, value in values.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from ``state``; of a window that was longer, the latest numbers are kept."""
        for name in (*self.counts, *self.state):
            if name in state:
                now, value = getattr(self, name), state[name]
                setattr(self, name, Window(now.maxlen or 0, value) if isinstance(now, Window) else value)


class StepRule(Rule):
    """One condition on a step's own numbers."""

    counts = ("judged", "quiet")

    def __init__(self, settings: AlertSettings) -> None:
        super().__init__(settings)
        #: readings before the next event; 0: none
        self.quiet = 0

    def begins(self, reading: Reading) -> Event | None:
        event = self.judge(reading)
        if event is None:
            self.quiet = max(0, self.quiet - 1)
            return None
        repeated, self.quiet = self.quiet > 0, self.calm
        return None if repeated else event

    @abstractmethod
    def judge(self, reading: Reading) -> Event | None:
        """Take the reading in; an event if the condition holds in it, whether or not one was made before."""
