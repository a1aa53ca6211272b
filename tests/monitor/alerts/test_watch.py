"""All rules together."""

from __future__ import annotations

import json

from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_mp.monitor.alerts import RULE_KINDS, Alerts, Operand, Reading
from lightning_mp.monitor.events import Event
from monitor.alerts.feed import noise


def troubled(seed: int = 0) -> list[Reading]:
    """A run in which every rule finds something."""
    columns = zip(noise(700, 2.0, 0.05, seed), noise(700, 1.0, 0.2, seed + 1), strict=True)
    readings = []
    for step, (loss, norm) in enumerate(columns):
        late, stuck = step >= 300, step >= 650
        readings.append(
            Reading(
                step=step,
                loss=9.0 if 600 <= step < 610 else loss,
                grad_norm=norm * (1000 if step == 280 else 1),
                update_ratio=0.0,
                lost_updates=0.9,
                fp8={
                    ("layer", "input"): Operand(
                        0.5 if late else 0.0, 2.0**10 if stuck else 1.0, 0.4 if stuck else 448.0
                    )
                },
                loss_scale=1.0 if stuck else 2.0**16,
                skipped=stuck,
                skips_in_a_row=max(0, step - 649),
                scale_at_floor=stuck,
                lr=1e-3,
                samples_per_s=10.0 if late else 100.0,
                memory_gib=4.0 + 0.001 * step,
            )
        )
    return readings


def run(alerts: Alerts, readings: list[Reading]) -> list[Event]:
    return [event for reading in readings for event in alerts.judge(reading)]


def test_every_rule_speaks_once_and_says_what_why_and_what_to_do() -> None:
    events = run(Alerts(), troubled())
    assert sorted(event.kind for event in events) == sorted(RULE_KINDS)
    for event in events:
        assert event.is_alert
        assert event.cause
        assert event.advice
        assert event.evidence
        assert event.value is not None
        of_fp8 = "role" in event.evidence
        assert (event.rank, event.module, event.action) == (None, "layer" if of_fp8 else None, "log")


def test_stationary_noise_is_no_alert() -> None:
    count = 2000
    numbers = zip(
        noise(count, 5.0, 0.1, 1),
        noise(count, 2.0, 0.5, 2),
        noise(count, 0.1, 0.2, 3),
        noise(count, 4, 0.01, 4),
        strict=True,
    )
    readings = [
        # the loss of a model that learned something in its first steps
        Reading(
            step=step,
            loss=loss + 5 * 0.9**step,
            grad_norm=norm,
            update_ratio=1e-3,
            samples_per_s=8 / seconds,
            seconds=seconds,
            memory_gib=gib,
        )
        for step, (loss, norm, seconds, gib) in enumerate(numbers)
    ]
    assert run(Alerts(), readings) == []


def test_a_step_is_judged_once_by_each_rule_in_two_rounds() -> None:
    """Before the optimizer's step, when a bad one can still be left out, and after it."""
    early = ("grad_norm_spike", "loss_divergence")
    alerts, events = Alerts(), []
    for reading in troubled():
        first = Reading(step=reading.step, loss=reading.loss, grad_norm=reading.grad_norm)
        events += alerts.judge(first, only=early)
        events += alerts.judge(reading)
        assert alerts.judge(reading) == []
    assert {(event.step, event.kind) for event in events} == {
        (event.step, event.kind) for event in run(Alerts(), troubled())
    }


@settings(max_examples=15)
@given(cut=st.integers(0, 700), seed=st.integers(0, 99))
def test_a_resumed_run_goes_on_as_if_never_stopped(cut: int, seed: int) -> None:
    """Through JSON, as a checkpoint of plain values would hold it."""
    readings = troubled(seed)
    before, after = Alerts(), Alerts()
    events = run(before, readings[:cut])
    after.load_state_dict(json.loads(json.dumps(before.state_dict())))
    assert after.state_dict() == before.state_dict()
    assert events + run(after, readings[cut:]) == run(Alerts(), readings)


def test_a_state_of_other_settings_is_taken_as_far_as_it_goes() -> None:
    """Fewer rules, longer windows: what is there is used, what is not begins anew."""
    long, short = Alerts({"spike_window": 100}), Alerts({"spike_window": 10})
    run(long, troubled()[:200])
    state = {**long.state_dict(), "of_a_later_version": {}}
    del state["loss_plateau"]
    short.load_state_dict(state)
    assert short.state_dict()["grad_norm_spike"]["norms"] == long.state_dict()["grad_norm_spike"]["norms"][-10:]
    assert short.state_dict()["loss_plateau"] == Alerts().state_dict()["loss_plateau"]


def test_a_rewound_run_is_judged_again() -> None:
    """Steps that come a second time are steps like any other."""
    alerts = Alerts({"kinds": ["grad_norm_spike"]})
    calm = [Reading(step=step, grad_norm=norm) for step, norm in enumerate(noise(120))]
    spike = Reading(step=120, grad_norm=1e3)
    assert [event.step for event in run(alerts, [*calm, spike, *calm[80:], spike])] == [120, 120]
