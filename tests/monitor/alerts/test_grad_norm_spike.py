from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_mp.monitor.alerts import AlertSettings
from monitor.alerts.feed import noise, rows, said, steps

ARMED = AlertSettings().spike_window


def with_spikes(at: dict[int, float], count: int = 300, **kind: float) -> list[float]:
    """Noise of which some steps are so many times as large."""
    return [norm * at.get(step, 1.0) for step, norm in enumerate(noise(count, **kind))]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("times", "heard"),
    [(3, False), (7, False), (30, True), (100, True), (1e6, True)],
)
def test_it_is_heard_from_ten_times_the_median_on(times: float, heard: bool) -> None:
    norms = with_spikes({170: times}, spread=0.1)
    assert steps("grad_norm_spike", rows(grad_norm=norms)) == ([170] if heard else [])


def test_the_ratio_alone_is_not_enough() -> None:
    """Norms that swing over two orders of magnitude all the time: 15 times the median is nothing new."""
    norms = with_spikes({170: 1.0}, spread=0.9)
    norms[170] = 15.0
    assert steps("grad_norm_spike", rows(grad_norm=norms)) == []
    assert steps("grad_norm_spike", rows(grad_norm=norms), spike_sigmas=5) != []


def test_standard_deviations_alone_are_not_enough() -> None:
    """Norms that hardly move: twice the median is a hundred standard deviations, and harmless."""
    norms = with_spikes({170: 2.0}, spread=0.005)
    assert steps("grad_norm_spike", rows(grad_norm=norms)) == []
    assert steps("grad_norm_spike", rows(grad_norm=norms), spike_ratio=1.5) == [170]


def test_norms_that_never_move_have_no_spread_to_divide_by() -> None:
    (event,) = said("grad_norm_spike", rows(grad_norm=[1.0] * 100 + [50.0] + [1.0] * 20))
    assert (event.step, event.value, event.evidence["ratio"]) == (100, 50.0, 50.0)
    (event,) = said("grad_norm_spike", rows(grad_norm=[0.0] * 100 + [1.0]))
    assert event.evidence["ratio"] == math.inf


def test_a_small_norm_has_to_be_farther_off() -> None:
    """A model that knows its data: norms a thousandth of what they were go up 39-fold and nothing happens."""
    calm = [norm * (1.0 if step < 100 else 1e-3) for step, norm in enumerate(noise(400, spread=0.1))]
    assert steps("grad_norm_spike", rows(grad_norm=[*calm, 0.039])) == []
    assert steps("grad_norm_spike", rows(grad_norm=[*calm, 0.2])) == [400]
    assert steps("grad_norm_spike", rows(grad_norm=[*calm, 0.039]), spike_level=0.01) == [400]


def test_it_is_silent_before_it_has_seen_a_window() -> None:
    assert steps("grad_norm_spike", rows(grad_norm=with_spikes({ARMED - 1: 1e3}, spread=0.1))) == []
    assert steps("grad_norm_spike", rows(grad_norm=with_spikes({ARMED: 1e3}, spread=0.1))) == [ARMED]


def test_one_spike_is_one_event_and_the_next_one_another() -> None:
    """A spike that lasts some steps is told once; the same again later is news."""
    times = {170: 100.0, 171: 200.0, 173: 80.0, 220: 100.0}
    assert steps("grad_norm_spike", rows(grad_norm=with_spikes(times, spread=0.1))) == [170, 220]


def test_the_run_goes_on_at_a_new_level() -> None:
    norms = noise(200, spread=0.1) + noise(200, level=100.0, spread=0.1)
    assert steps("grad_norm_spike", rows(grad_norm=norms)) == [200]


@pytest.mark.parametrize("missing", [None, math.nan, math.inf])
def test_what_is_no_number_leaves_no_trace(missing: float | None) -> None:
    """As many overflows as would fill the window, and one spike after them."""
    norms: list[float | None] = [missing] * 300
    norms[::3] = noise(100, spread=0.1)
    assert steps("grad_norm_spike", rows(grad_norm=[*norms, 100.0])) == [300]


@settings(max_examples=50)
@given(power=st.integers(-60, 60), seed=st.integers(0, 2**16), at=st.integers(ARMED, 149), times=st.floats(1, 1e4))
def test_units_do_not_matter(power: int, seed: int, at: int, times: float) -> None:
    """Powers of two, so that no number is rounded."""
    norms = with_spikes({at: times}, count=150, seed=seed)
    scaled = [norm * 2.0**power for norm in norms]
    assert steps("grad_norm_spike", rows(grad_norm=scaled)) == steps("grad_norm_spike", rows(grad_norm=norms))


@settings(max_examples=50)
@given(seed=st.integers(0, 2**16), times=st.floats(200, 1e6), order=st.randoms(use_true_random=False))
def test_the_order_within_the_window_does_not_matter(seed: int, times: float, order: object) -> None:
    window, last = noise(ARMED, seed=seed), noise(1, seed=seed)[0] * times
    shuffled = sorted(window, key=lambda _: order.random())  # type: ignore[attr-defined]
    one, other = (said("grad_norm_spike", rows(grad_norm=[*norms, last])) for norms in (window, shuffled))
    assert one == other
    assert len(one) == 1
