"""The charts of a report as plain values, which the page's script draws."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import pairwise
from textwrap import shorten
from typing import Any, Literal

from markupsafe import escape

from lightning_mp.errors import number
from lightning_mp.record import metric_names as names
from lightning_mp.record.report.load import Run, Series

#: the most points of a series, about two for every pixel of a wide chart; the most marks of a run
MAX_POINTS, MAX_MARKS = 3000, 300
Scale = Literal["linear", "log", "log2", "share"]

# a dashed line over a solid one leaves both visible, and lines differ in more than their colour
_DASHES = ("solid", "dash", "dot", "dashdot", "longdash")
NOTHING = "-"


def plain(value: Any) -> str:
    """Return a value from a JSON file as short text. ``None`` is a dash, a nested value an ellipsis."""
    if value is None:
        return NOTHING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return number(value)
    if isinstance(value, (list, tuple)):
        return ", ".join("…" if isinstance(item, (list, dict)) else plain(item) for item in value)
    return "…" if isinstance(value, dict) else str(value)


def moment(value: Any) -> str:
    """Return an ISO 8601 time as a readable date. Other text is unchanged, other values are as from ``plain``."""
    if not isinstance(value, str):
        return plain(value)
    try:
        return datetime.fromisoformat(value).strftime("%d %b %Y %H:%M %Z").strip().lstrip("0")
    except ValueError:
        return value


@dataclass(frozen=True, slots=True)
class Panel:
    """A chart over steps.

    ``lines`` maps a reading's name to its label. ``unit`` titles the vertical axis, and ``scale``
    is that axis's kind.

    ``traits`` holds words with spaces between them. ``stepped`` draws a value until the next
    reading. ``from-zero`` begins the axis at 0, so that small differences look small.
    """

    title: str
    unit: str
    lines: Mapping[str, str]
    scale: Scale = "linear"
    traits: str = ""


KNOWN: tuple[Panel, ...] = (
    Panel("Loss", "loss", {names.LOSS: "training", names.VAL_LOSS: "validation"}),
    Panel("Gradient norm", "L2 norm", {names.GRAD_NORM: "all parameters"}, "log"),
    Panel("Parameter norm", "L2 norm", {names.PARAM_NORM: "all parameters"}),
    Panel("Update-to-weight ratio", "update / weights (L2)", {names.UPDATE_RATIO: "all parameters"}, "log"),
    Panel("Loss scale", "factor on the loss", {names.LOSS_SCALE: "loss scale"}, "log2", "stepped"),
    Panel(
        "FP8 scales",
        "largest number / largest magnitude",
        {names.FP8_SCALE_MAX: "largest", names.FP8_SCALE_MIN: "smallest"},
        "log2",
    ),
    Panel("Skipped steps", "steps", {names.SKIPPED_STEPS: "in total"}, traits="stepped"),
    Panel("Learning rate", "learning rate", {names.LR: "learning rate"}),
    Panel("Tokens per second", "tokens / s", {names.TOKENS_PER_S: "tokens"}, traits="from-zero"),
    Panel("Samples per second", "samples / s", {names.SAMPLES_PER_S: "samples"}, traits="from-zero"),
    Panel("Model FLOPs utilisation", "share of the device's peak", {names.MFU: "MFU"}, "share", "from-zero"),
    Panel("Memory", "GiB", {names.MEMORY_PEAK: "peak", names.MEMORY_ALLOCATED: "allocated"}, traits="from-zero"),
)


def lay_out(runs: Sequence[Run]) -> list[Panel]:
    """Return the charts with recorded readings. If several runs are compared, each line has its own chart."""
    recorded = {name for run in runs for name, series in run.series.items() if _drawn(name, series)}
    panels: list[Panel] = []
    for panel in KNOWN:
        own = {name: label for name, label in panel.lines.items() if name in recorded}
        if len(runs) == 1:
            panels += [replace(panel, lines=own)] if own else []
            continue
        for name, label in own.items():
            title = f"{panel.title}, {label}" if len(own) > 1 else panel.title
            panels.append(replace(panel, lines={name: label}, title=title))
    return panels


def _drawn(name: str, series: Series) -> bool:
    """True if a series is worth a line: it has a finite value, or is a loss or gradient norm.

    A loss or gradient norm that was never finite is shown, because it is the sign of a failing run.
    """
    return bool(series.finite) or (bool(series.values) and name in (names.LOSS, names.GRAD_NORM))


def draw(panel: Panel, runs: Sequence[Run]) -> dict[str, Any]:
    """Return the chart of ``panel`` as plain values for the page's script.

    Runs without a reading of it have no line. Each line and mark has the index of its run, which
    the reader may hide, and its colour's name in the page's style. Names and texts are escaped,
    because Plotly reads markup in them. A logarithmic axis becomes linear if no value is positive.
    """
    many = len(runs) > 1
    recorded = [
        (place, place if many else index, run.name if many else label, run.series[name])
        for place, run in enumerate(runs)
        for index, (name, label) in enumerate(panel.lines.items())
        if _drawn(name, run.series.get(name, Series()))
    ]
    logarithmic, scale = panel.scale in ("log", "log2"), panel.scale
    if logarithmic and max((value for *_, series in recorded for value in series.finite), default=0) <= 0:
        logarithmic, scale = False, "linear"
    lines: list[dict[str, Any]] = []
    for place, style, name, series in recorded:
        # a logarithmic axis cannot show a value of 0 or less
        placed = [None if logarithmic and value is not None and value <= 0 else value for value in series.values]
        drawn = downsample(Series(series.steps, placed))
        look = {"run": place, "colour": f"run-{style}", "dash": dash(style), "name": str(escape(name))}
        lines.append({**look, "x": drawn.steps, "y": drawn.values})
    about = {"key": panel.title, "title": panel.title, "unit": panel.unit, "scale": scale}
    marks = [mark for place, run in enumerate(runs) for mark in _marks(run, place, many)]
    return {**about, "traits": panel.traits.split(), "lines": lines, "marks": marks}


def _marks(run: Run, place: int, many: bool) -> Iterator[dict[str, Any]]:
    """Yield the marks of at most :data:`MAX_MARKS` alerts of a run. Errors take precedence over warnings."""
    left = MAX_MARKS
    for severity in ("error", "warning"):
        events = [event for event in run.alerts if event.severity == severity][:left]
        left -= len(events)
        if events:
            texts = [shorten(f"{run.name}, {event}" if many else str(event), 160, placeholder="…") for event in events]
            yield {
                "run": place,
                "colour": f"run-{place}" if many else severity,
                "severity": severity,
                "x": [event.step for event in events],
                "text": [str(escape(text)) for text in texts],
            }


def dash(style: int) -> str:
    """Return the dash style of line ``style`` of a chart, or of run ``style`` of a comparison."""
    return _DASHES[style % len(_DASHES)]


def downsample(series: Series, limit: int = MAX_POINTS) -> Series:
    """Return at most ``limit`` (8 or more) of the readings, in order; the series itself if it is short.

    The readings between the first and the last are cut into stretches of about equal length. From
    each stretch the lowest and the highest are kept, and the first that is not finite (the min-max
    aggregation of Jugel and others, "M4: a visualization-oriented time series data aggregation",
    VLDB 2014).
    """
    count = len(series.values)
    if count <= limit:
        return series
    edges = [1 + bucket * (count - 2) // ((limit - 2) // 3) for bucket in range((limit - 2) // 3 + 1)]
    kept = {0, count - 1}
    for start, stop in pairwise(edges):
        finite = [(value, index) for index in range(start, stop) if (value := series.values[index]) is not None]
        kept |= {min(finite)[1], max(finite)[1]} if finite else set()
        if len(finite) < stop - start:
            kept.add(series.values.index(None, start))
    return Series([series.steps[index] for index in sorted(kept)], [series.values[index] for index in sorted(kept)])
