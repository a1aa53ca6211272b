"""The last n numbers, and robust statistics of them."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import islice, pairwise
from typing import Any

#: a normal distribution's standard deviation in median absolute deviations
SIGMA = 1.4826


class Window(deque[float]):
    """The last ``size`` numbers, oldest first."""

    def __init__(self, size: int, values: Iterable[float] = ()) -> None:
        super().__init__(values, maxlen=size)

    @property
    def full(self) -> bool:
        """Whether it holds as many as it can."""
        return len(self) == self.maxlen

    # deque's own hands over (values, maxlen)
    def __reduce__(self) -> Any:
        return type(self), (self.maxlen or 0, list(self))

    def parts(self, count: int) -> list[list[float]]:
        """``count`` pieces of it in order, none shorter than another by more than one."""
        edges = [len(self) * edge // count for edge in range(count + 1)]
        return [list(islice(self, first, last)) for first, last in pairwise(edges)]


def median(values: Iterable[float]) -> float:
    """The middle one of some numbers."""
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def sigma(values: Sequence[float] | Window, center: float) -> float:
    """The standard deviation of normal numbers around ``center``, from their median absolute deviation."""
    return SIGMA * median([abs(value - center) for value in values])


def known(value: float | None) -> float | None:
    """The number if it is known and finite, else ``None``."""
    return value if value is not None and math.isfinite(value) else None
