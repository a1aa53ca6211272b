"""The two rules that look at the loss scale."""

from __future__ import annotations

import pytest

from lightning_mp.monitor.alerts import Reading
from lightning_mp.monitor.events import Kind
from monitor.alerts.feed import said, steps

KINDS: tuple[Kind, ...] = ("skip_streak", "scale_collapse")


def scaled(
    overflows: str, init: float = 2.0**16, floor: float = 1.0, interval: int = 100, every: int = 1
) -> list[Reading]:
    """A torch scaler over steps of which ``x`` overflows, read every so many steps."""
    readings, scale, clean, row = [], init, 0, 0
    for step, sign in enumerate(overflows):
        bad = sign == "x"
        row, clean = (row + 1, 0) if bad else (0, clean + 1)
        scale = max(floor, scale / 2) if bad else scale
        if clean == interval:
            scale, clean = scale * 2, 0
        readings.append(
            Reading(step=step, loss_scale=scale, skipped=bad, skips_in_a_row=row, scale_at_floor=scale <= floor)
        )
    return readings[every - 1 :: every]


def all_said(readings: list[Reading]) -> dict[Kind, list[int]]:
    return {kind: found for kind in KINDS if (found := steps(kind, readings))}


@pytest.mark.parametrize(
    ("overflows", "options"),
    [
        ("." * 2000, {}),
        ("xxxxx" + "." * 500, {}),
        ("x.xx..xxxxx" + "." * 500, {}),
        ("..xxxxx" + "." * 150 + "xx" + "." * 500, {}),
        ("x" * 13 + "." * 500, {"init": 2.0**24}),  # eight of these search from above
        ("x" * 16 + "." * 200, {"init": 2.0**32}),
        (("." * 40 + "x") * 20, {"interval": 40}),
        ("." * 2000, {"interval": 100, "every": 50}),
        ("." * 500, {"init": 1.0, "interval": 10_000}),  # at the floor, where nothing overflows
        ("x" + "." * 9 + "x" + "." * 300, {"init": 1.0, "interval": 10_000}),
    ],
)
def test_ordinary_overflows_are_no_alert(overflows: str, options: dict[str, float]) -> None:
    assert all_said(scaled(overflows, **options)) == {}  # type: ignore[arg-type]


def test_six_skips_in_a_row_are_a_streak_told_once() -> None:
    (event,) = said("skip_streak", scaled("." * 50 + "x" * 30 + "." * 50))
    assert (event.step, event.value) == (55, 6.0)
    assert event.evidence == {"skips_in_a_row": 6, "loss_scale": 2.0**10}
    assert steps("skip_streak", scaled("." * 50 + "x" * 8 + "." * 50 + "x" * 8)) == [55, 113]


def test_a_streak_without_a_scale_speaks_of_the_data() -> None:
    readings = [Reading(step=step, skipped=step > 9, skips_in_a_row=max(0, step - 9)) for step in range(20)]
    (event,) = said("skip_streak", readings)
    assert event.step == 15
    assert "fp16" not in event.cause
    assert "loss_scale" not in event.evidence


def test_a_scale_at_its_floor_that_still_overflows_has_collapsed() -> None:
    """2**16 is used up after 16 overflows; the third skip at the floor is the word."""
    (event,) = said("scale_collapse", scaled("." * 20 + "x" * 40))
    assert (event.step, event.severity, event.value) == (20 + 15 + 2, "error", 1.0)
    assert event.evidence["skipped_at_floor"] == 3


def test_a_scale_without_a_floor_has_collapsed_below_one() -> None:
    """torch's own scaler goes on to 1e-38."""
    assert steps("scale_collapse", scaled("x" * 40, floor=0.0)) == [18]


def test_a_floor_that_is_left_alone_and_met_again_is_told_twice() -> None:
    overflows = "x" * 10 + "." * 30 + "x" * 10
    assert steps("scale_collapse", scaled(overflows, init=1.0, interval=1000)) == [2, 42]
