"""Readings by the hundred, and what one rule says to them."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import Any

from lightning_mp.monitor.alerts import Alerts, Reading
from lightning_mp.monitor.events import Event, Kind


def rows(**columns: Sequence[Any]) -> list[Reading]:
    """A reading a step, from columns of equal length."""
    names = list(columns)
    return [
        Reading(step=step, **dict(zip(names, row, strict=True)))
        for step, row in enumerate(zip(*columns.values(), strict=True))
    ]


def said(kind: Kind, readings: Iterable[Reading], **settings: Any) -> list[Event]:
    """The events of one rule alone."""
    alerts = Alerts({"kinds": [kind], **settings})
    return [event for reading in readings for event in alerts.judge(reading)]


def steps(kind: Kind, readings: Iterable[Reading], **settings: Any) -> list[int]:
    """The steps at which one rule spoke."""
    return [event.step for event in said(kind, readings, **settings)]


def noise(count: int, level: float = 1.0, spread: float = 0.2, seed: int = 0) -> list[float]:
    """Positive numbers around a level, independent of one another."""
    draw = random.Random(seed)
    return [level * draw.lognormvariate(0.0, spread) for _ in range(count)]
