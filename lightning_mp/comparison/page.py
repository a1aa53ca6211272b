"""A comparison as files: ``compare.json``, and one HTML page in the report's style that opens without a network."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning_mp.comparison import results as text
from lightning_mp.comparison.results import Comparison, PlanResult, interval_of
from lightning_mp.monitor import metric_names
from lightning_mp.monitor.report.charts import Panel, draw
from lightning_mp.monitor.report.load import Run, Series
from lightning_mp.monitor.report.page import document, put
from lightning_mp.monitor.run_folder import to_json

JSON, PAGE = "compare.json", "compare.html"
_DIFFERENCE = {
    "compare/mean": "mean",
    "compare/low": "95 % interval, lower end",
    "compare/high": "95 % interval, upper end",
}


def write(comparison: Comparison, folder: Path) -> None:
    """Write both files into ``folder``.

    Raises:
        MissingExtraError: plotly is not installed.
        OSError: they cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    put(folder / JSON, to_json(comparison.to_dict(), indent=2) + "\n")
    put(folder / PAGE, render(comparison))


def render(comparison: Comparison) -> str:
    """The page.

    Raises:
        MissingExtraError: plotly is not installed.
    """
    plans = comparison.plans
    runs = [_as_run(plan.name, {metric_names.LOSS: _mean(plan)}) for plan in plans]
    drawn = [draw(Panel(f"Loss, {_seeds(comparison)}", "loss", {metric_names.LOSS: "loss"}), runs)]
    last = comparison.final_loss_steps
    for plan in plans[1:]:
        band = _band(plans[0], plan, last)
        if band:
            title = f"{plan.name} minus {plans[0].name}, paired" + (f", mean of {last} steps" if last > 1 else "")
            panel = Panel(title, "difference of the loss", _DIFFERENCE)
            drawn.append(draw(panel, [_as_run(plan.name, band)]))
    about = comparison.about
    names = [plan.name for plan in plans]
    gaps = {seed: [one.differences.get(seed) for one in comparison.differences] for seed in comparison.seeds}
    losses = {seed: [plan.runs[place].final_loss for plan in plans] for place, seed in enumerate(comparison.seeds)}
    seed_rows = [
        [
            str(seed),
            *(text.NOTHING if loss is None else f"{loss:.4f}" for loss in losses[seed]),
            *(text.NOTHING if gap is None else text.signed(gap) for gap in gaps[seed]),
        ]
        for seed in comparison.seeds
    ]
    return document(
        Path(__file__).with_name("compare.html.j2"),
        title=f"{' and '.join(names)} compared" if len(names) == 2 else f"{len(names)} plans compared",
        payload={"charts": drawn, "steps": [1, comparison.steps]},
        runs=runs,
        words=[about["module"], about["machine"]["device"], _seeds(comparison), f"{comparison.steps} steps a run"],
        failed=[(plan.name, run) for plan in plans for run in plan.failed],
        heads=text.heads(comparison),
        rows=list(enumerate(text.rows(comparison))),
        notes=text.notes(comparison),
        seed_heads=["seed", *names, *(f"{one.second} minus first" for one in comparison.differences)],
        seed_rows=seed_rows,
        about=about,
        plans=plans,
    )


def _seeds(comparison: Comparison) -> str:
    count = len(comparison.seeds)
    return f"mean of {count} seeds" if count > 1 else "one seed"


# ---------------------------------------------------------------------- curves


def _as_run(name: str, series: dict[str, Series]) -> Run:
    return Run(Path(name), name, series)


def _series(values: Sequence[float]) -> Series:
    # below a billionth it is rounding, for which an axis would have labels as long as the chart is wide
    finite = [round(value, 9) if math.isfinite(value) else None for value in values]
    return Series(list(range(1, len(values) + 1)), finite)


def _mean(plan: PlanResult) -> Series:
    """The mean over the seeds that ran to their end, step by step."""
    runs = [run.losses for run in plan.runs if run.losses]
    return _series([statistics.fmean(losses) for losses in zip(*runs, strict=False)])


def _band(first: PlanResult, second: PlanResult, last: int) -> dict[str, Series]:
    """The paired difference of the mean of ``last`` losses, step by step: at the last step that of the final losses."""
    pairs = [(a.losses, b.losses) for a, b in zip(first.runs, second.runs, strict=True) if a.losses and b.losses]
    found: dict[str, list[float]] = {name: [] for name in _DIFFERENCE}
    for step in range(1, min((min(len(a), len(b)) for a, b in pairs), default=0) + 1):
        since = max(0, step - last)
        values = [statistics.fmean(b[since:step]) - statistics.fmean(a[since:step]) for a, b in pairs]
        ends = interval_of(values) if all(map(math.isfinite, values)) else None
        for name, value in zip(_DIFFERENCE, (statistics.fmean(values), *(ends or (math.nan, math.nan))), strict=True):
            found[name].append(value)
    drawn: dict[str, Any] = {name: _series(values) for name, values in found.items()}
    return {name: series for name, series in drawn.items() if series.finite}
