"""The two rules that look at the machine: speed and memory."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_mp.monitor.alerts import AlertSettings, Reading
from monitor.alerts.feed import noise, rows, said, steps

SETTINGS = AlertSettings()
ARMED = SETTINGS.throughput_warmup + SETTINGS.throughput_window


def timed(seconds: list[float], batch: int = 8) -> list[Reading]:
    return [Reading(step=step, samples_per_s=batch / each, seconds=each) for step, each in enumerate(seconds)]


def test_the_third_slow_step_is_the_word() -> None:
    (event,) = said("throughput_drop", timed(noise(200, level=0.01) + [0.1] * 50))
    assert event.step == 202
    assert event.evidence["samples_per_s"] == pytest.approx(80)
    assert event.evidence["ratio"] == pytest.approx(0.1, rel=0.2)


@pytest.mark.parametrize(
    "slow",
    [[1.0], [1.0, 1.0], [1.0, 0.01, 1.0, 0.01, 1.0], [0.02] * 50],
    ids=["a hiccup", "two", "several", "half as fast"],
)
def test_a_hiccup_is_no_drop(slow: list[float]) -> None:
    assert steps("throughput_drop", timed(noise(200, level=0.01) + slow + noise(50, level=0.01))) == []


def test_what_costs_no_time_is_no_drop_until_it_does() -> None:
    """Steps of 1 ms that take 5: nobody would notice three, or ten."""
    assert steps("throughput_drop", timed(noise(200, level=0.001, spread=0.05) + [0.005] * 10)) == []
    (step,) = steps("throughput_drop", timed(noise(200, level=0.001, spread=0.05) + [0.005] * 100))
    assert 220 < step < 230


def test_a_rate_without_a_time_counts_by_itself() -> None:
    assert steps("throughput_drop", rows(samples_per_s=[100.0] * 200 + [10.0] * 5)) == [202]


def test_a_busy_machine_asks_for_more_in_a_row() -> None:
    """Three slow steps among a hundred fast ones before: six in a row are needed."""
    busy = noise(200, level=0.01)
    for hiccup in (120, 150, 180):
        busy[hiccup] = 0.1
    assert steps("throughput_drop", timed(busy + [0.1] * 50)) == [205]


def test_tokens_count_before_samples() -> None:
    """Longer sequences are fewer samples a second, and no drop."""
    readings = rows(samples_per_s=[100.0] * 200 + [10.0] * 9, tokens_per_s=[1e4] * 209)
    assert steps("throughput_drop", readings) == []


def test_a_creeping_slowdown_is_found() -> None:
    assert steps("throughput_drop", timed([0.1 * 1.005**step for step in range(400)])) != []


def test_it_waits_for_a_window_after_a_slow_start() -> None:
    seconds = [1.0] * SETTINGS.throughput_warmup + noise(SETTINGS.throughput_window, level=0.01)
    assert steps("throughput_drop", timed(seconds)) == []
    assert steps("throughput_drop", timed([*seconds, 1.0, 1.0, 1.0])) == [ARMED + 2]
    assert steps("throughput_drop", timed([*seconds[:-1], 1.0, 1.0, 1.0])) == []


def test_a_slow_night_is_one_event() -> None:
    seconds = noise(200, level=0.01) + ([0.1] * 30 + [0.01] * 20) * 8
    assert len(steps("throughput_drop", timed(seconds))) == 1


def memory(gib: list[float]) -> list[Reading]:
    return rows(memory_gib=gib)


def test_memory_that_creeps_is_found_once_with_its_pace() -> None:
    grown = [4.0 + 0.001 * step for step in range(1000)]
    (event,) = said("memory_growth", memory(grown))
    assert event.step == SETTINGS.memory_warmup + SETTINGS.memory_window - 1
    assert event.evidence["gib_per_1000_steps"] == pytest.approx(0.9, rel=0.05)


def test_the_pace_is_by_steps_not_by_readings() -> None:
    readings = [Reading(step=10 * step, memory_gib=4.0 + 0.01 * step) for step in range(260)]
    assert said("memory_growth", readings)[0].evidence["gib_per_1000_steps"] == pytest.approx(0.9, rel=0.05)


@pytest.mark.parametrize(
    "gib",
    [
        [4.0] * 1000,
        [1.0 + 3.0 * min(step, 40) / 40 for step in range(1000)],  # a warm-up
        [4.0] * 400 + [6.0] * 600,  # another shape, once
        [4.0 + (step % 100) * 0.01 for step in range(1000)],  # emptied at the end of an epoch
        [4.0 + 1e-5 * step for step in range(1000)],  # too little to mention
        [80.0 + 2e-3 * step for step in range(1000)],  # likewise, of 80 GiB
    ],
)
def test_other_memory_is_left_alone(gib: list[float]) -> None:
    assert steps("memory_growth", memory(gib)) == []


@settings(max_examples=30)
@given(seed=st.integers(0, 2**16))
def test_memory_that_goes_up_and_down_is_left_alone(seed: int) -> None:
    draw = random.Random(seed)
    assert steps("memory_growth", memory([4.0 + draw.random() for _ in range(600)])) == []


def test_what_is_not_known_is_not_judged() -> None:
    readings = [Reading(step=step) for step in range(600)]
    assert steps("memory_growth", readings) == steps("throughput_drop", readings) == []
