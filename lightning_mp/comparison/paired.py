"""The paired difference of two plans over seeds: its mean, its interval, and what that says against a margin."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from lightning_mp.errors import is_number

Verdict = Literal["same", "better", "worse", "undecided"]

#: the margin where none is given, as a share of the first plan's mean final loss
MARGIN_SHARE = 0.005
_CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class Difference:
    """Final losses of ``second`` minus those of ``first``, seed by seed.

    ``mean_difference`` is ``None`` without a seed in which both ended with a number, ``interval`` (95 %, Student's t)
    with fewer than two of them. ``verdict`` speaks of ``second``; ``reason`` says in a sentence what it rests on.
    """

    first: str
    second: str
    differences: dict[int, float]
    mean_difference: float | None
    interval: tuple[float, float] | None
    margin: float
    verdict: Verdict
    reason: str


def compare_losses(
    first: tuple[str, Mapping[int, float | None]], second: tuple[str, Mapping[int, float | None]], margin: float | None
) -> Difference:
    """What ``second`` lost or gained; each is a name and, by seed, a final loss: NaN if it diverged, None if it failed.

    ``margin=None`` is half a percent of the first plan's mean final loss.
    """
    (one, losses), (other, theirs) = first, second
    finite = [loss for loss in losses.values() if is_number(loss)]
    if margin is None:
        margin = MARGIN_SHARE * abs(statistics.fmean(finite)) if finite else 0.0
    differences: dict[int, float] = {}
    diverged: list[int] = []
    for seed, loss in losses.items():
        its = theirs.get(seed)
        if is_number(loss) and is_number(its):
            differences[seed] = its - loss
        elif is_number(loss) and its is not None:
            diverged.append(seed)
    mean = statistics.fmean(differences.values()) if differences else None
    interval = interval_of(list(differences.values()))
    verdict, reason = _verdict(interval, margin, diverged, len(differences))
    return Difference(one, other, differences, mean, interval, margin, verdict, reason)


def _verdict(
    interval: tuple[float, float] | None, margin: float, diverged: list[int], count: int
) -> tuple[Verdict, str]:
    if diverged:
        seeds = ", ".join(map(str, diverged))
        return "worse", f"its loss was not finite in seed {seeds}, where the first plan's was"
    if interval is None:
        return "undecided", f"{count} paired seed{'s' * (count != 1)}: an interval needs two"
    low, high = interval
    if -margin <= low and high <= margin:
        return "same", "the interval lies within the margin"
    if low > 0:
        return "worse", "the interval lies above 0, and not within the margin"
    if high < 0:
        return "better", "the interval lies below 0, and not within the margin"
    return "undecided", "the interval holds 0 and reaches beyond the margin: more seeds narrow it"


def interval_of(values: list[float]) -> tuple[float, float] | None:
    """The 95 % interval of a mean by Student's t; ``None`` with fewer than two values."""
    if len(values) < 2:
        return None
    mean, error = statistics.fmean(values), statistics.stdev(values) / math.sqrt(len(values))
    half = student_t(_CONFIDENCE, len(values) - 1) * error
    return mean - half, mean + half


def student_t(confidence: float, freedom: int) -> float:
    """The t beyond which, on both sides together, ``1 - confidence`` of Student's distribution lies."""
    low, high = 0.0, 1e4  # enough for 99.99 % at one degree of freedom
    while high - low > 1e-12 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if _within(middle, freedom) < confidence else (low, middle)
    return high


def _within(t: float, freedom: int) -> float:
    """The share of Student's distribution between -t and t (Abramowitz and Stegun, 26.7.3 and 26.7.4)."""
    angle = math.atan(t / math.sqrt(freedom))
    odd = freedom % 2
    term = math.cos(angle) if odd else 1.0
    total = 0.0
    for index in range(1 + odd, freedom, 2):
        total += term
        term *= math.cos(angle) ** 2 * index / (index + 1)
    total *= math.sin(angle)
    return 2 / math.pi * (angle + total) if odd else total
