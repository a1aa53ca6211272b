"""The few figures that a run comes down to: the last loss, the best validation loss, speed, memory, skips, alerts."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightning_mp.monitor import metric_names
from lightning_mp.monitor.report.compared import difference, speed_up
from lightning_mp.monitor.report.load import Run
from lightning_mp.monitor.report.markup import Html, join, table, tag
from lightning_mp.monitor.report.numbers import counted, number
from lightning_mp.monitor.report.traces import dash

NOTHING = "-"


@dataclass(frozen=True, slots=True)
class Figure:
    """One of them: what it is, its value, and a few words on where it comes from."""

    name: str
    value: str
    detail: str = ""
    unit: str = ""


def summarize(run: Run) -> list[Figure]:
    """The same figures in the same order for every run; what is not known has the value of a dash."""
    return [
        _loss(run),
        _best_validation(run),
        _throughput(run),
        _memory(run),
        _skips(run),
        _alerts(run),
    ]


def tiles(run: Run) -> Html:
    """The figures of one run."""
    return tag(
        "div",
        *(
            tag(
                "div",
                tag("span", figure.name, class_="name"),
                tag("strong", figure.value, tag("small", f" {figure.unit}") if figure.unit else None),
                tag("span", figure.detail, class_="detail"),
                class_="tile",
            )
            for figure in summarize(run)
        ),
        class_="tiles",
    )


def comparison(runs: Sequence[Run], not_run: Mapping[str, str]) -> Html:
    """The figures of several runs, a row each, and the reason of those that did not run."""
    figures = [summarize(run) for run in runs]
    first = runs[0]
    relations = [f"loss \N{MINUS SIGN} {first.name}'s", "speed-up"]
    heads = ["run", "state", "last step", *relations, *(figure.name for figure in figures[0])]
    rows = [
        [
            tag("span", swatch(place), run.name, class_="run"),
            state(run),
            NOTHING if run.last_step is None else f"{run.last_step:,}",
            difference(run),
            NOTHING if run is first else speed_up(run, first),
            *(f"{figure.value} {figure.unit}".strip() for figure in found),
        ]
        for place, (run, found) in enumerate(zip(runs, figures, strict=True))
    ]
    reasons = [
        tag("p", tag("strong", name), f" did not run: {reason}", class_="quiet") for name, reason in not_run.items()
    ]
    explained = (
        "The loss difference is the mean over the second half of the steps, after smoothing, and below it the band "
        f"that it kept to. Speed-up: the median throughput against that of {first.name}."
    )
    numbers = table(heads, rows, numbers=range(2, len(heads)))
    return join([tag("div", numbers, class_="stacked"), *reasons, tag("p", explained, class_="quiet")])


def swatch(place: int) -> Html:
    """The colour and the dash of a run's lines."""
    return tag("i", class_=f"swatch {dash(place)}", style=f"--colour: var(--run-{place % 8})")


def state(run: Run) -> Html:
    """How the run stands, as it said itself."""
    status = run.about.get("status")
    known = status if status in ("running", "finished", "failed") else "unknown"
    return tag("span", str(known), class_=f"state {known}")


def _loss(run: Run) -> Figure:
    found = run.series.get(metric_names.LOSS)
    last = (
        [] if found is None else [pair for pair in zip(found.steps, found.values, strict=True) if pair[1] is not None]
    )
    if not last or last[-1][1] is None:
        return Figure("final loss", NOTHING, "not recorded")
    return Figure("final loss", number(last[-1][1]), f"step {last[-1][0]:,}")


def _best_validation(run: Run) -> Figure:
    found = run.series.get(metric_names.VAL_LOSS)
    pairs = [] if found is None else [(v, s) for s, v in zip(found.steps, found.values, strict=True) if v is not None]
    if not pairs:
        return Figure("best val loss", NOTHING, "not recorded")
    value, step = min(pairs)
    return Figure("best val loss", number(value), f"step {step:,}")


def _throughput(run: Run) -> Figure:
    for name, unit in ((metric_names.TOKENS_PER_S, "tokens/s"), (metric_names.SAMPLES_PER_S, "samples/s")):
        if values := _finite(run, name):
            return Figure("median throughput", number(statistics.median(values)), "over all readings", unit)
    return Figure("median throughput", NOTHING, "not recorded")


def _memory(run: Run) -> Figure:
    for name, what in ((metric_names.MEMORY_PEAK, "peak"), (metric_names.MEMORY_ALLOCATED, "highest reading")):
        if values := _finite(run, name):
            small = max(values) < 1
            value = f"{max(values) * 1024:.0f}" if small else f"{max(values):.3g}"
            return Figure("peak memory", value, what, "MiB" if small else "GiB")
    return Figure("peak memory", NOTHING, "not recorded")


def _skips(run: Run) -> Figure:
    values = _finite(run, metric_names.SKIPPED_STEPS)
    if not values:
        return Figure("skipped steps", NOTHING, "not recorded")
    return Figure("skipped steps", number(values[-1]), "in total")


def _alerts(run: Run) -> Figure:
    errors = sum(event.severity == "error" for event in run.alerts)
    notices = len(run.events) - len(run.alerts)
    parts = [counted(errors, "error")] if errors else []
    parts += [counted(notices, "notice")] if notices else []
    return Figure("alerts", number(len(run.alerts)), ", ".join(parts))


def _finite(run: Run, name: str) -> list[float]:
    found = run.series.get(name)
    return [] if found is None else found.finite
