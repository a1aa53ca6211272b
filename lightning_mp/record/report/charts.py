"""The charts of a report, whose readings and marks the page's script draws."""

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

#: points a series may have, about two for every pixel of a wide chart; alerts marked on a chart
MAX_POINTS, MAX_MARKS = 3000, 300
Scale = Literal["linear", "log", "log2", "share"]

# Curves that coincide stay visible: a later one is dashed over an earlier; colour is not all that tells them apart.
_DASHES = ("solid", "dash", "dot", "dashdot", "longdash")
NOTHING = "-"


def plain(value: Any) -> str:
    """A value out of a JSON file in a few words; what is nested in it is left out."""
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
    """Return a date and time of ISO 8601 as a person reads it; anything else as ``plain`` does."""
    if not isinstance(value, str):
        return plain(value)
    try:
        return datetime.fromisoformat(value).strftime("%d %b %Y %H:%M %Z").strip().lstrip("0")
    except ValueError:
        return value


@dataclass(frozen=True, slots=True)
class Panel:
    """A chart over steps; ``lines`` has the label of each reading, ``unit`` is the vertical axis's title.

    Of the ``traits``, ``stepped`` holds a value until the next reading; ``from-zero`` keeps the axis honest about
    differences.
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
    """The charts of what ``runs`` recorded; where several are compared, one for each line."""
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
    """Whether there is anything to see: a loss or a norm that was never finite is what a failing run has to show."""
    return bool(series.finite) or (bool(series.values) and name in (names.LOSS, names.GRAD_NORM))


def draw(panel: Panel, runs: Sequence[Run]) -> dict[str, Any]:
    """The chart of ``panel`` for every run that recorded something of it, as plain values for the page's script.

    Every line and mark has the run it belongs to, which the reader may hide, and the name of its colour in the page's
    style. Names and texts are escaped, since Plotly reads markup in them.
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
        # what is not positive has no place on a logarithmic axis
        placed = [None if logarithmic and value is not None and value <= 0 else value for value in series.values]
        drawn = downsample(Series(series.steps, placed))
        look = {"run": place, "colour": f"run-{style}", "dash": dash(style), "name": str(escape(name))}
        lines.append({**look, "x": drawn.steps, "y": drawn.values})
    about = {"key": panel.title, "title": panel.title, "unit": panel.unit, "scale": scale}
    marks = [mark for place, run in enumerate(runs) for mark in _marks(run, place, many)]
    return {**about, "traits": panel.traits.split(), "lines": lines, "marks": marks}


def _marks(run: Run, place: int, many: bool) -> Iterator[dict[str, Any]]:
    """Alerts, the errors first."""
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
    """How line number ``style`` of a chart, or run number ``style`` of a comparison, is dashed."""
    return _DASHES[style % len(_DASHES)]


def downsample(series: Series, limit: int = MAX_POINTS) -> Series:
    """At most ``limit`` (8 or more) of the readings, in order.

    The readings between the first and the last are cut into stretches of equal length; of each stay the lowest, the
    highest, and one that was not finite where there is one (the min-max aggregation of Jugel and others, "M4: a
    visualization-oriented time series data aggregation", VLDB 2014).
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
