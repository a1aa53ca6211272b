"""The few figures that a run comes down to, and how a report writes numbers."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from lightning_mp.errors import counted
from lightning_mp.monitor import metric_names
from lightning_mp.monitor.report.load import Run, Series

NOTHING = "-"
_RATES = ((metric_names.TOKENS_PER_S, "tokens/s"), (metric_names.SAMPLES_PER_S, "samples/s"))
_RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


@dataclass(frozen=True, slots=True)
class Figure:
    """What it is, its value, and a few words on where it comes from."""

    name: str
    value: str = NOTHING
    detail: str = "not recorded"
    unit: str = ""


def figures(run: Run) -> list[Figure]:
    """The same figures in the same order for every run; what is not known has the value of a dash."""
    skips, peaks = run.finite(metric_names.SKIPPED_STEPS), run.finite(metric_names.MEMORY_PEAK)
    rates = next(((run.finite(name), unit) for name, unit in _RATES if run.finite(name)), None)
    errors, notices = sum(event.severity == "error" for event in run.alerts), len(run.events) - len(run.alerts)
    parts = [counted(count, noun) for count, noun in ((errors, "error"), (notices, "notice")) if count]
    rate, memory, skipped = (Figure(name) for name in ("median throughput", "peak memory", "skipped steps"))
    if rates is not None:
        rate = Figure(rate.name, number(statistics.median(rates[0])), "over all readings", rates[1])
    if peaks:
        highest, small = max(peaks), max(peaks) < 1
        value = f"{highest * 1024:.0f}" if small else f"{highest:.3g}"
        memory = Figure(memory.name, value, "peak", "MiB" if small else "GiB")
    if skips:
        skipped = Figure(skipped.name, number(skips[-1]), "in total")
    return [
        _loss("final loss", run, metric_names.LOSS, lambda pairs: pairs[-1]),
        _loss("best val loss", run, metric_names.VAL_LOSS, min),
        rate,
        memory,
        skipped,
        Figure("alerts", number(len(run.alerts)), ", ".join(parts)),
    ]


def state(run: Run) -> str:
    """How the run stands, as it said itself."""
    status = run.about.get("status")
    return status if status in ("running", "finished", "failed") else "unknown"


def _loss(title: str, run: Run, name: str, choose: Any) -> Figure:
    found = run.series.get(name, Series())
    pairs = [(value, step) for step, value in zip(found.steps, found.values, strict=True) if value is not None]
    if not pairs:
        return Figure(title)
    value, step = choose(pairs)
    return Figure(title, number(value), f"step {step:,}")


# ---------------------------------------------------------------------- numbers


def number(value: float) -> str:
    """Four significant digits, whole numbers with separators, powers of ten only where they are shorter."""
    if value == int(value) and abs(value) < 1e9:
        return f"{int(value):,}"
    return f"{value:,.0f}" if 1e3 <= abs(value) < 1e9 else f"{value:.4g}"


def power_of_two(value: float) -> str:
    """``2¹⁶`` for a power of two, which a loss scale nearly always is."""
    mantissa, exponent = math.frexp(value)
    return f"2{str(exponent - 1).translate(_RAISED)}" if mantissa == 0.5 else number(value)


def plain(value: Any) -> str:
    """A value out of a JSON file in a few words; what is nested in it is left out."""
    if value is None:
        return NOTHING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return number(value) if math.isfinite(value) else str(value)
    if isinstance(value, (list, tuple)):
        return ", ".join("…" if isinstance(item, (list, dict)) else plain(item) for item in value)
    return "…" if isinstance(value, dict) else str(value)


def moment(value: str) -> str:
    """A date and time of ISO 8601 as one reads it; anything else stays as it is."""
    try:
        return datetime.fromisoformat(value).strftime("%d %b %Y %H:%M %Z").strip().lstrip("0")
    except ValueError:
        return value
