"""A clock that is the same on every machine: a busy one would make steps look slow that are not."""

from __future__ import annotations


class SteadyClock:
    """In place of the module ``time``: every look at it takes ``tick`` seconds, and a sleep as long as it says."""

    def __init__(self, tick: float = 0.005) -> None:
        self.tick, self._now = tick, 0.0

    def perf_counter(self) -> float:
        """Seconds since it was made."""
        self._now += self.tick
        return self._now

    def sleep(self, seconds: float) -> None:
        """Takes no time of the test's."""
        self._now += seconds
