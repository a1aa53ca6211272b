"""What a report says first: how a run ended and why, in a sentence or two, and the pin that was suggested."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from lightning_mp.errors import counted, number
from lightning_mp.record import metric_names as names
from lightning_mp.record.events import Event
from lightning_mp.record.report.charts import figures, state
from lightning_mp.record.report.load import Run

_PINS = re.compile(r"""(?:pins=|DtypePinning\()\{['"][^'"…]+['"]: [^}]*\}\)?""")


def verdict(run: Run) -> str:
    """How the run ended, what its loss did, and the first sign of what went wrong."""
    first, steps, skips = first_sign(run), run.last_step or 0, run.finite(names.SKIPPED_STEPS)
    if skips and skips[-1] > steps:  # which count from 0
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


def first_sign(run: Run) -> Event | None:
    """The earliest alert of a run that had an error or failed, which later ones often follow from."""
    bad = state(run) == "failed" or any(event.severity == "error" for event in run.alerts)
    return min(run.alerts, key=lambda event: event.step, default=None) if bad else None


def suggested_pins(run: Run) -> str:
    """The pin that the earliest alert with one advises, as it is pasted; empty where there is none."""
    found = (_PINS.search(event.advice) for event in sorted(run.events, key=lambda event: event.step))
    return next((match[0] for match in found if match), "")


def summary(run: Run) -> dict[str, Any]:
    """The verdict and the figures as plain values."""
    said = {"run": run.name, "state": state(run), "last_step": run.last_step, "verdict": verdict(run)}
    values = {figure.name.replace(" ", "_"): figure.number for figure in figures(run)}
    return {**said, "suggested_pins": suggested_pins(run) or None, **values}


def compared(runs: Sequence[Run]) -> str:
    """Which run has the lowest final loss, and which is the fastest."""
    losses = {run.name: run.finite(names.LOSS)[-1] for run in runs if run.finite(names.LOSS)}
    rates = {run.name: figures(run)[2] for run in runs}
    best = (
        f"{min(losses, key=losses.__getitem__)} has the lowest final loss, {number(min(losses.values()))}."
        if losses
        else ""
    )
    speeds = {name: rate.number for name, rate in rates.items() if rate.number is not None}
    if not speeds:
        return best
    fastest = max(speeds, key=speeds.__getitem__)
    return f"{best} {fastest} is the fastest, {rates[fastest].value} {rates[fastest].unit}.".strip()
