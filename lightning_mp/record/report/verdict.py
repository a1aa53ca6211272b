"""The summary of a run: its verdict, the suggested pin, and a few figures."""

import re
import statistics
from dataclasses import dataclass
from typing import Any

from lightning_mp.errors import counted, in_bytes, number
from lightning_mp.record import metric_names as names
from lightning_mp.record.events import Event
from lightning_mp.record.report.load import Run, Series

_PINS = re.compile(r"""(?:pins=|DtypePinning\()\{['"][^'"…]+['"]: [^}]*\}\)?""")
_RATES = {names.TOKENS_PER_S: "tokens/s", names.SAMPLES_PER_S: "samples/s"}


def state(run: Run) -> str:
    """Return the status in ``run.json``: running, finished or failed; else ``"unknown"``."""
    status = run.about.get("status")
    return status if status in ("running", "finished", "failed") else "unknown"


def verdict(run: Run) -> str:
    """Return a sentence or two about the run.

    The first says that all steps were skipped, or at which step the run failed, or how the loss
    changed. If the run failed or had an error, the second names its earliest alert. For
    other runs the first ends with the number of alerts.
    """
    first, steps, skips = _first_sign(run), run.last_step or 0, run.finite(names.SKIPPED_STEPS)
    if skips and skips[-1] > steps:  # steps count from 0
        said = f"It trained nothing: all of its {counted(steps + 1, 'step')} were skipped"
    elif state(run) == "failed":
        said = f"It failed at step {steps:,}"
    else:
        said = _loss_said(run)
    if first is None:
        return f"{said}; {counted(len(run.alerts), 'warning') if run.alerts else 'no alerts'}."
    where = f" in {first.module or first.parameter}" if first.module or first.parameter else ""
    cause = f", {first.cause}" if first.cause else ""
    return f"{said}. First sign, at step {first.step:,}: {first.kind.replace('_', ' ')}{where}{cause}."


def _loss_said(run: Run) -> str:
    recorded, losses = run.series.get(names.LOSS), run.finite(names.LOSS)
    if recorded is None or not losses:
        return "No loss was recorded" if recorded is None else "No loss was finite"
    first, last = losses[0], losses[-1]
    way = f"{'fell' if last < first else 'rose'} from {number(first)} to {number(last)}"
    lost = ", then it was not finite" if recorded.values[-1] is None else ""
    return f"The loss {way if len(losses) > 1 else f'was {number(first)}'}{lost}"


def _first_sign(run: Run) -> Event | None:
    """Return the earliest alert if the run failed or had an error; else ``None``.

    Later alerts often follow from the earliest.
    """
    bad = state(run) == "failed" or any(event.severity == "error" for event in run.alerts)
    return min(run.alerts, key=lambda event: event.step, default=None) if bad else None


def suggested_pins(run: Run) -> str:
    """Return the pins that the earliest event with any advises, ready to paste; else an empty string."""
    advised = (_PINS.search(event.advice) for event in sorted(run.events, key=lambda event: event.step))
    return next((match[0] for match in advised if match), "")


def summary(run: Run) -> dict[str, Any]:
    """Return the verdict and the figures as plain values."""
    said = {"run": run.name, "state": state(run), "last_step": run.last_step, "verdict": verdict(run)}
    values = {figure.name.replace(" ", "_"): figure.number for figure in figures(run)}
    return {**said, "suggested_pins": suggested_pins(run) or None, **values}


# ---------------------------------------------------------------------- figures


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure of a run: its name, the shown value, a note on its origin, its unit, and the number."""

    name: str
    value: str = "-"
    detail: str = "not recorded"
    unit: str = ""
    number: float | None = None


def figures(run: Run) -> list[Figure]:
    """Return the figures of a run: the same for every run, in the same order. An unknown value is a dash."""
    skips, peak = run.finite(names.SKIPPED_STEPS), max(run.finite(names.MEMORY_PEAK), default=None)
    rate = next((name for name in _RATES if run.finite(name)), None)
    median = None if rate is None else statistics.median(run.finite(rate))
    held, unit = in_bytes((peak or 0.0) * 2**30).split()
    errors = sum(event.severity == "error" for event in run.alerts)
    return [
        _loss("final loss", run, names.LOSS, lambda pairs: pairs[-1]),
        _loss("best val loss", run, names.VAL_LOSS, min),
        _figure("median throughput", median, "over all readings", _RATES.get(rate or "", "")),
        _figure("peak memory", peak, "peak", unit, held),
        _figure("skipped steps", skips[-1] if skips else None, "in total"),
        _figure("alerts", len(run.alerts), counted(errors, "error") if errors else ""),
    ]


def _figure(name: str, value: float | None, detail: str, unit: str = "", shown: str = "") -> Figure:
    return Figure(name) if value is None else Figure(name, shown or number(value), detail, unit, value)


def _loss(title: str, run: Run, name: str, choose: Any) -> Figure:
    series = run.series.get(name, Series())
    pairs = [(value, step) for step, value in zip(series.steps, series.values, strict=True) if value is not None]
    value, step = choose(pairs) if pairs else (None, 0)
    return _figure(title, value, f"step {step:,}")
