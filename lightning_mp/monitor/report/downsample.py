"""Fewer points than readings, without losing what a reader looks for: the extremes, the ends, the gaps."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_mp.monitor.report.load import Series

#: Points a series may have; about two for every pixel of a wide chart.
MAX_POINTS = 3000


def thin(series: Series, limit: int = MAX_POINTS) -> Series:
    """At most ``limit`` (8 or more) of the readings, in order.

    The readings between the first and the last are cut into stretches of equal length; of each stay the lowest, the
    highest, and one that was not finite where there is one (the min-max aggregation of Jugel and others, "M4: a
    visualization-oriented time series data aggregation", VLDB 2014).
    """
    count = len(series.values)
    if count <= limit:
        return series
    buckets = (limit - 2) // 3
    inner = count - 2
    kept = [0]
    for bucket in range(buckets):
        kept += _kept(series.values, 1 + bucket * inner // buckets, 1 + (bucket + 1) * inner // buckets)
    kept.append(count - 1)
    return Series([series.steps[index] for index in kept], [series.values[index] for index in kept])


def _kept(values: Sequence[float | None], start: int, stop: int) -> list[int]:
    finite = [(value, index) for index in range(start, stop) if (value := values[index]) is not None]
    kept = {min(finite)[1], max(finite)[1]} if finite else set[int]()
    if len(finite) < stop - start:
        kept.add(next(index for index in range(start, stop) if values[index] is None))
    return sorted(kept)
