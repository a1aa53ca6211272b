"""A comparison as files: ``compare.json``, and one HTML page in the report's style that opens without a network."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning_mp.comparison import table as text
from lightning_mp.comparison.compare import Comparison, PlanResult
from lightning_mp.comparison.paired import interval_of
from lightning_mp.monitor import metric_names
from lightning_mp.monitor.report.figures import draw
from lightning_mp.monitor.report.load import Run, Series
from lightning_mp.monitor.report.markup import Html, facts, folded, join, table, tag
from lightning_mp.monitor.report.numbers import plain
from lightning_mp.monitor.report.page import charts, document
from lightning_mp.monitor.report.panels import Line, Panel
from lightning_mp.monitor.report.summary import swatch
from lightning_mp.monitor.report.write import put
from lightning_mp.monitor.strict_json import to_json

JSON, PAGE = "compare.json", "compare.html"
#: a verdict in the colours of a run's state
_STATES = {"same": "finished", "better": "finished", "worse": "failed", "undecided": "unknown"}
_DIFFERENCE = (
    Line("compare/mean", "mean"),
    Line("compare/low", "95 % interval, lower end"),
    Line("compare/high", "95 % interval, upper end"),
)


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
    names = [plan.name for plan in comparison.plans]
    runs = [_as_run(plan.name, {metric_names.LOSS: _mean(plan)}) for plan in comparison.plans]
    drawn = [draw(Panel("loss", f"Loss, {_seeds(comparison)}", "loss", (Line(metric_names.LOSS, "loss"),)), runs)]
    last = comparison.final_loss_steps
    for number, plan in enumerate(comparison.plans[1:]):
        band = _band(comparison.plans[0], plan, last)
        if band:
            title = f"{plan.name} minus {names[0]}, paired, mean of {last} steps"
            panel = Panel(f"difference_{number}", title, "difference of the loss", _DIFFERENCE)
            drawn.append(draw(panel, [_as_run(plan.name, band)]))
    content = {
        "sections": {},
        "charts": [chart.to_dict() for chart in drawn],
        "steps": [1, comparison.steps],
        "running": False,
    }
    title = f"{' and '.join(names)} compared" if len(names) == 2 else f"{len(names)} plans compared"
    return document(title, [*_before(comparison, title), *charts(runs), *_after(comparison)], content)


def _before(comparison: Comparison, title: str) -> list[Html]:
    words = [comparison.about["module"], comparison.about["machine"]["name"], _seeds(comparison)]
    head = join([tag("h1", title), tag("p", " · ".join([*words, f"{comparison.steps} steps a run"]), class_="quiet")])
    failed = [(plan.name, run) for plan in comparison.plans for run in plan.failed]
    faults = [tag("p", tag("strong", f"{name}, seed {run.seed}, failed: "), run.error) for name, run in failed]
    rows = [
        [tag("span", swatch(place), cells[0], class_="run"), *cells[1:-1], _verdict(cells[-1])]
        for place, cells in enumerate(text.rows(comparison))
    ]
    heads = text.heads(comparison)
    summary = join(
        [
            tag("div", table(heads, rows, numbers=range(1, len(heads) - 1)), class_="stacked"),
            tag("ul", *(tag("li", note) for note in text.notes(comparison)), class_="quiet"),
        ]
    )
    return [
        tag("section", head, id="head"),
        tag("section", tag("div", *faults, class_="notice error") if failed else None, id="faults"),
        tag("section", summary, id="summary"),
    ]


def _verdict(word: str) -> Html | str:
    return tag("span", word, class_=f"state {_STATES[word]}") if word in _STATES else word


def _after(comparison: Comparison) -> list[Html]:
    differences = [f"{one.second} minus first" for one in comparison.differences]
    heads = ["seed", *(plan.name for plan in comparison.plans), *differences]
    rows = [
        [
            str(seed),
            *(_figure(plan.runs[place].final_loss, "{:.4f}") for plan in comparison.plans),
            *(_figure(one.differences.get(seed), "{:+.4f}") for one in comparison.differences),
        ]
        for place, seed in enumerate(comparison.seeds)
    ]
    seeds = tag("div", table(heads, rows, numbers=range(1, len(heads))), class_="stacked")
    about = [(name, comparison.about[name].items()) for name in ("machine", "versions")]
    blocks = [
        tag("div", tag("h3", name), facts((key.replace("_", " "), plain(value)) for key, value in values))
        for name, values in about
    ]
    plans = [
        folded(plan.name, tag("pre", tag("code", json.dumps(plan.policy.to_dict(), indent=2))), f"plan-{place}")
        for place, plan in enumerate(comparison.plans)
    ]
    return [
        tag("section", tag("h2", "Final losses, seed by seed"), seeds, id="seeds"),
        tag(
            "section",
            tag("h2", "Machine, versions, plans"),
            tag("div", *blocks, class_="blocks"),
            *plans,
            id="about",
        ),
    ]


def _figure(value: float | None, form: str) -> str:
    return text.NOTHING if value is None else form.format(value)


def _seeds(comparison: Comparison) -> str:
    count = len(comparison.seeds)
    return f"mean of {count} seeds" if count > 1 else "one seed"


# ---------------------------------------------------------------------- curves


def _as_run(name: str, series: dict[str, Series]) -> Run:
    return Run(Path(name), name, series)


def _series(values: Sequence[float]) -> Series:
    finite = [value if math.isfinite(value) else None for value in values]
    return Series(list(range(1, len(values) + 1)), finite)


def _mean(plan: PlanResult) -> Series:
    """The mean over the seeds that ran to their end, step by step."""
    runs = [run.losses for run in plan.runs if run.losses]
    return _series([statistics.fmean(losses) for losses in zip(*runs, strict=False)])


def _band(first: PlanResult, second: PlanResult, last: int) -> dict[str, Series]:
    """The paired difference of the mean of ``last`` losses, step by step: at the last step that of the final losses."""
    pairs = [(a.losses, b.losses) for a, b in zip(first.runs, second.runs, strict=True) if a.losses and b.losses]
    found: dict[str, list[float]] = {line.name: [] for line in _DIFFERENCE}
    for step in range(1, min((min(len(a), len(b)) for a, b in pairs), default=0) + 1):
        since = max(0, step - last)
        values = [statistics.fmean(b[since:step]) - statistics.fmean(a[since:step]) for a, b in pairs]
        ends = interval_of(values) if all(map(math.isfinite, values)) else None
        for line, value in zip(_DIFFERENCE, (statistics.fmean(values), *(ends or (math.nan, math.nan))), strict=True):
            found[line.name].append(value)
    drawn: dict[str, Any] = {name: _series(values) for name, values in found.items()}
    return {name: series for name, series in drawn.items() if series.finite}
