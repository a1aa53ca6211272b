"""A comparison as files: ``compare.json``, and one HTML page in the report's style that opens without a network."""

from __future__ import annotations

import math
import statistics
from pathlib import Path

from lightning_mp.comparison import results as text
from lightning_mp.comparison.results import Comparison, PlanResult
from lightning_mp.monitor import metric_names
from lightning_mp.monitor.report.charts import Panel, draw
from lightning_mp.monitor.report.load import Run, Series
from lightning_mp.monitor.report.page import document, put
from lightning_mp.monitor.run_folder import to_json

JSON, PAGE = "compare.json", "compare.html"


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
    plans, about = comparison.plans, comparison.about
    runs = [Run(Path(plan.name), plan.name, {metric_names.LOSS: _mean(plan)}) for plan in plans]
    seeds = f"mean of {len(comparison.seeds)} seeds" if len(comparison.seeds) > 1 else "one seed"
    drawn = [draw(Panel(f"Loss, {seeds}", "loss", {metric_names.LOSS: "loss"}), runs)]
    names = [plan.name for plan in plans]
    return document(
        Path(__file__).with_name("compare.html.j2"),
        title=f"{' and '.join(names)} compared" if len(names) == 2 else f"{len(names)} plans compared",
        payload={"charts": drawn, "steps": [1, comparison.steps]},
        runs=runs,
        words=[about["module"], about["machine"]["device"], seeds, f"{comparison.steps} steps a run"],
        failed=[(plan.name, run) for plan in plans for run in plan.failed],
        heads=text.heads(comparison),
        rows=list(enumerate(text.rows(comparison))),
        notes=text.notes(comparison),
        about=about,
        plans=plans,
    )


def _mean(plan: PlanResult) -> Series:
    """The mean over the seeds that ran to their end, step by step."""
    runs = [run.losses for run in plan.runs if run.losses]
    means = [statistics.fmean(losses) for losses in zip(*runs, strict=False)]
    return Series(list(range(1, len(means) + 1)), [value if math.isfinite(value) else None for value in means])
