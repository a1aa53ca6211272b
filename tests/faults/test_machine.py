"""Only a slow stretch, only without a core, only before the fault."""

from __future__ import annotations

from typing import Any

import pytest

from faults.machine import excused, unexcused
from lightning_mp.monitor.events import Event

STARVED = {98: 0.2, 99: 0.3, 100: 0.1}


def event(kind: Any = "throughput_drop", step: int = 100) -> Event:
    return Event(step=step, kind=kind, severity="warning")


@pytest.mark.parametrize(
    ("given", "shares", "is_excused"),
    [
        (event(), STARVED, True),
        (event(), {**STARVED, 99: 0.9}, False),
        (event(), {}, False),
        (event("memory_growth"), STARVED, False),
    ],
)
def test_who_is_to_blame(given: Event, shares: dict[int, float], is_excused: bool) -> None:
    assert excused(given, shares) is is_excused


def test_slow_data_is_not_excused() -> None:
    assert unexcused([event()], STARVED, began=98) == [event()]
    assert unexcused([event()], STARVED, began=200) == []
