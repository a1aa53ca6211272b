"""What every rule is: a state machine that judges one reading after another and does not repeat itself."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

from lightning_mp.monitor.alerts.reading import Reading
from lightning_mp.monitor.alerts.settings import AlertSettings
from lightning_mp.monitor.alerts.window import Window
from lightning_mp.monitor.events import Event, Kind


class Rule(ABC):
    """One condition. It speaks when that begins, and not again before it has been over for ``calm`` readings.

    ``state`` names the attributes that a resumed run needs: numbers, flags, or a :class:`Window`.
    """

    kind: ClassVar[Kind]
    state: ClassVar[tuple[str, ...]] = ()
    #: readings without the condition before it may speak again
    calm: ClassVar[int] = 10

    def __init__(self, settings: AlertSettings) -> None:
        self.settings = settings
        #: the step judged last, so that no step is judged twice
        self.judged: int | None = None
        #: readings until it may speak again; 0: now
        self.quiet = 0

    def look(self, reading: Reading) -> Event | None:
        """The event of a condition that begins in this reading."""
        if reading.step == self.judged:
            return None
        self.judged = reading.step
        event = self.judge(reading)
        if event is None:
            self.quiet = max(0, self.quiet - 1)
            return None
        spoke, self.quiet = self.quiet > 0, self.calm
        return None if spoke else event

    @abstractmethod
    def judge(self, reading: Reading) -> Event | None:
        """Take the reading in; an event if the condition holds in it, whether or not that was said before."""

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs, as plain values."""
        values = {name: getattr(self, name) for name in ("judged", "quiet", *self.state)}
        return {name: list(value) if isinstance(value, Window) else value for name, value in values.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there; of a window that was longer the latest numbers count."""
        for name in ("judged", "quiet", *self.state):
            if name in state:
                held = getattr(self, name)
                value = state[name]
                setattr(self, name, Window(held.maxlen or 0, value) if isinstance(held, Window) else value)
