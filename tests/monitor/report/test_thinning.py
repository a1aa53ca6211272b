"""Thinning long series: fewer points, and all that a reader looks for still there."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lightning_mp.monitor.report.downsample import thin
from lightning_mp.monitor.report.load import Series

_readings = st.lists(st.none() | st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=400)


@given(_readings, st.integers(8, 60))
def test_extremes_and_ends_stay_and_no_more_points_than_asked_for(values: list[float | None], limit: int) -> None:
    series = Series(list(range(len(values))), values)
    thinned = thin(series, limit)
    assert len(thinned.values) <= max(limit, 8)
    assert (thinned.steps[0], thinned.steps[-1]) == (series.steps[0], series.steps[-1])
    if series.finite:
        assert min(thinned.finite) == min(series.finite)
        assert max(thinned.finite) == max(series.finite)
    assert bool(thinned.gaps) == bool(series.gaps)


@given(_readings, st.integers(8, 60))
def test_every_point_is_a_reading_and_their_order_is_kept(values: list[float | None], limit: int) -> None:
    thinned = thin(Series(list(range(len(values))), values), limit)
    assert thinned.steps == sorted(set(thinned.steps))
    assert thinned.values == [values[step] for step in thinned.steps]


def test_a_spike_of_one_step_among_a_million_stays() -> None:
    values: list[float | None] = [1.0] * 1_000_000
    values[654_321] = 9.0
    thinned = thin(Series(list(range(len(values))), values))
    assert len(thinned.values) <= 3000
    assert thinned.steps[thinned.values.index(9.0)] == 654_321


def test_a_short_series_is_left_alone() -> None:
    series = Series([1, 2], [1.0, None])
    assert thin(series) is series
