"""The judge can fail: what is late, missing, misnamed or false is told."""

from __future__ import annotations

from typing import Any

import pytest

from faults.judge import Expected, Row, Verdict, judge, missed
from lightning_mp.monitor.events import Event

NAN = Expected(("nonfinite_loss", "nonfinite_grad"), began=200, first=200, module="model.h.1", rank=1)
SPIKE = Expected(("grad_norm_spike",), began=200, first=201)


def event(step: int, kind: Any = "nonfinite_loss", severity: Any = "warning", **fields: Any) -> Event:
    return Event(step=step, kind=kind, severity=severity, **fields)


def named(step: int) -> Event:
    return event(step, module="model.h.1", rank=1)


@pytest.mark.parametrize(
    ("events", "steps", "is_named", "good"),
    [
        ([named(200)], 1, True, True),
        ([named(202)], 3, True, True),
        ([named(203)], 4, False, False),
        ([], None, None, False),
        ([event(200, "grad_norm_spike")], None, None, False),
        ([event(200)], 1, False, False),
        ([event(200, module="model.h.1", rank=0)], 1, False, False),
        ([event(200, module="model.h.0", rank=1)], 1, False, False),
        ([event(200, module="model.h.0", rank=1), named(201)], 1, True, True),
        ([event(200), named(203)], 1, False, False),
        ([named(199)], None, None, False),
    ],
)
def test_a_fault_with_a_name(events: list[Event], steps: int | None, is_named: bool | None, good: bool) -> None:
    verdict = judge(NAN, events)
    assert (verdict.steps, verdict.named, verdict.good) == (steps, is_named, good)


@pytest.mark.parametrize(("step", "steps", "good"), [(200, 1, True), (201, 1, True), (203, 3, True), (204, 4, False)])
def test_a_fault_without_one(step: int, steps: int, good: bool) -> None:
    """The earliest counts, and steps are counted from the first that could show it."""
    verdict = judge(SPIKE, [event(step, "grad_norm_spike"), event(step + 1, "grad_norm_spike")])
    assert (verdict.steps, verdict.named, verdict.good) == (steps, None, good)


def test_an_alert_before_the_fault_is_a_false_one_and_an_overflow_is_none() -> None:
    verdict = judge(
        SPIKE, [event(3, "nonfinite_grad", "info"), event(150, "loss_plateau"), event(201, "grad_norm_spike")]
    )
    assert verdict.good
    assert [text.partition(" (")[0] for text in verdict.false] == ["step 150: loss plateau"]


def test_nineteen_of_twenty_are_enough_and_one_false_alert_is_too_many() -> None:
    good = Verdict(1, True)
    row = Row("fault", (good, good, Verdict(3, True), Verdict(2, False), Verdict(None)))
    assert row.cells() == ["fault", "3 of 5", "1.5", "3 of 4", "0"]
    assert missed([Row("a", (good,) * 19), Row("b", (Verdict(None),)), Row("healthy")]) == []
    assert missed([Row("a", (good,) * 18), Row("b", (Verdict(None),) * 2)]) == [
        "18 of 20 faults found within 3 steps and named right, not 95%"
    ]
    assert missed([Row("healthy", alerts=("step 9: loss plateau",))]) == ["healthy: step 9: loss plateau"]
    assert len(missed([Row("fault", (Verdict(1, None, false=("step 9: loss plateau",)),))])) == 1
