"""Whether a fault was found, when, and named right. Pure: events in, a verdict out."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from lightning_mp.monitor.events import Event

#: the first step that could show a fault, and the two after it
WITHIN = 3
#: of all faults
TARGET = 0.95


@dataclass(frozen=True)
class Expected:
    """What a run has to bring to light: ``first`` is the first step that could show what ``began`` in it or before."""

    kinds: Collection[str]
    began: int
    first: int
    module: str | None = None
    rank: int | None = None


@dataclass(frozen=True)
class Verdict:
    """One run. ``steps``: on how many steps it took, 1 the first that could show it, ``None`` if nothing was found.

    ``named``: whether module and rank were right, ``None`` where there is neither. ``false``: alerts before the fault.
    """

    steps: int | None
    named: bool | None = None
    false: tuple[str, ...] = ()
    seen: tuple[str, ...] = field(default=(), repr=False)

    @property
    def good(self) -> bool:
        """Whether it was found in time, and not under another name."""
        return self.steps is not None and self.steps <= WITHIN and self.named is not False


def judge(expected: Expected, events: Sequence[Event]) -> Verdict:
    """The earliest event of the right kind counts, among those the one that names it right."""
    false = tuple(str(event) for event in events if event.is_alert and event.step < expected.began)
    right = [event for event in events if event.kind in expected.kinds and event.step >= expected.began]
    seen = tuple(str(event) for event in events)
    if not right:
        return Verdict(None, None, false, seen)
    at = min(event.step for event in right)
    steps = max(1, at - expected.first + 1)
    if expected.module is None and expected.rank is None:
        return Verdict(steps, None, false, seen)
    named = any(_names(expected, event) for event in right if event.step < expected.first + WITHIN)
    return Verdict(steps, named, false, seen)


def _names(expected: Expected, event: Event) -> bool:
    module = expected.module is None or event.module == expected.module
    return module and (expected.rank is None or event.rank == expected.rank)


@dataclass(frozen=True)
class Row:
    """All runs of one fault, or one healthy run (``verdicts`` empty) with its alerts."""

    title: str
    verdicts: tuple[Verdict, ...] = ()
    alerts: tuple[str, ...] = ()

    @property
    def found(self) -> int:
        """How many were found in time and named right."""
        return sum(verdict.good for verdict in self.verdicts)

    @property
    def false(self) -> tuple[str, ...]:
        """Alerts while nothing was wrong."""
        return self.alerts + tuple(text for verdict in self.verdicts for text in verdict.false)

    def cells(self) -> list[str]:
        """Its line in the table."""
        if not self.verdicts:
            return [self.title, "-", "-", "-", str(len(self.false))]
        taken = [verdict.steps for verdict in self.verdicts if verdict.steps is not None]
        named = [verdict.named for verdict in self.verdicts if verdict.named is not None]
        return [
            self.title,
            f"{self.found} of {len(self.verdicts)}",
            f"{statistics.median(taken):g}" if taken else "-",
            f"{sum(named)} of {len(named)}" if named else "-",
            str(len(self.false)),
        ]


def missed(rows: Sequence[Row]) -> list[str]:
    """Which targets were missed, in words; nothing where all were met."""
    found, total = sum(row.found for row in rows), sum(len(row.verdicts) for row in rows)
    words = []
    if found < TARGET * total:
        words.append(f"{found} of {total} faults found within {WITHIN} steps and named right, not {TARGET:.0%}")
    return words + [f"{row.title}: {text}" for row in rows for text in row.false]
