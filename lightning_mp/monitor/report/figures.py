"""The charts as Plotly figures. Colours are left to the page, which knows whether it is dark."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from lightning_mp.errors import MissingExtraError
from lightning_mp.monitor.report.downsample import thin
from lightning_mp.monitor.report.load import Run, Series
from lightning_mp.monitor.report.numbers import number, power_of_two
from lightning_mp.monitor.report.panels import Panel, Scale, series_of
from lightning_mp.monitor.report.traces import curve, gaps, marks

_TICKS = 7
_FEW_DECADES = 3
# So many times the median, a spike on a linear axis presses everything else flat.
_SPIKE = 20
# What has to be said about some readings of a chart, with the number of them behind each line's name.
_NOTES = {
    "gaps": "Without a number (not finite or not known), a gap with a cross at the bottom",
    "below": "Zero or less, which this axis cannot show, so a gap with a cross",
    "back": "Steps go back (resumed or rewound) and the line breaks",
    "thinned": "Readings drawn, with the lowest and highest of every stretch among them",
}


@dataclass(frozen=True, slots=True)
class Chart:
    """A figure as Plotly's JSON, what stands above it, and what is to be said below it.

    ``switchable`` charts can have a linear or a logarithmic axis, as the reader likes.
    """

    key: str
    title: str
    unit: str
    latest: str
    notes: tuple[str, ...]
    switchable: bool
    figure: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for the page's script."""
        names = ("key", "title", "unit", "latest", "switchable")
        return {**{name: getattr(self, name) for name in names}, "notes": list(self.notes), **self.figure}


def draw(panel: Panel, runs: Sequence[Run]) -> Chart:
    """The chart of ``panel`` for every run that recorded something of it.

    Raises:
        MissingExtraError: plotly is not installed.
    """
    go = graph_objects()
    many = len(runs) > 1
    found = [
        (place, index, run.name if many else line.label, series)
        for place, run in enumerate(runs)
        for index, line in enumerate(panel.lines)
        if (series := series_of(run, line)) is not None
    ]
    panel = replace(panel, scale=_scale(panel, [value for *_, series in found for value in series.finite]))
    traces: list[Any] = []
    values: list[float] = []
    said: dict[str, list[str]] = {}
    for place, index, name, series in found:
        drawn, notes = _drawable(panel, series)
        for kind, count in notes.items():
            said.setdefault(kind, []).append(f"{name} {count}" if len(found) > 1 else count)
        style = place if many else index
        traces += [
            curve(go, panel, drawn, name, run=place, style=style),
            *gaps(go, drawn, name, run=place, style=style),
        ]
        values += drawn.finite
    traces += [mark for place, run in enumerate(runs) for mark in marks(go, panel, run, place, many=many)]
    figure = go.Figure(traces, _layout(go, panel, values))
    told = tuple(f"{text}: {', '.join(said[kind])}" for kind, text in _NOTES.items() if kind in said)
    latest = "" if many else _latest(panel, found[0][3])
    switchable = panel.scale in ("linear", "log") and min(values) > 0
    return Chart(panel.key, panel.title, panel.unit, latest, told, switchable, json.loads(figure.to_json()))


def graph_objects() -> Any:
    """Plotly's figures.

    Raises:
        MissingExtraError: plotly is not installed.
    """
    try:
        import plotly.graph_objects as go
    except ImportError:
        raise MissingExtraError("plotly", "report", "the report's charts") from None
    return go


def _scale(panel: Panel, values: Sequence[float]) -> Scale:
    """The panel's own scale, unless the values have no place on it, or would all but one lie flat on a linear one."""
    if panel.scale in ("log", "log2") and max(values) <= 0:
        return "linear"
    free = panel.scale == "linear" and not panel.from_zero and not panel.stepped
    if free and min(values) > 0 and max(values) > _SPIKE * statistics.median(values):
        return "log"
    return panel.scale


def _drawable(panel: Panel, series: Series) -> tuple[Series, dict[str, str]]:
    """The points to draw, and by kind of note how many readings it is about."""
    notes: dict[str, str] = {}
    if series.gaps:
        notes["gaps"] = f"{series.gaps:,}"
    steps, values = series.steps, series.values
    if panel.scale in ("log", "log2"):
        below = sum(value is not None and value <= 0 for value in values)
        if below:
            notes["below"] = f"{below:,}"
            values = [value if value is not None and value > 0 else None for value in values]
    back = sum(later < earlier for earlier, later in pairwise(steps))
    if back:
        notes["back"] = "once" if back == 1 else f"{back:,} times"
    drawn = thin(Series(steps, values))
    if len(drawn.steps) < len(steps):
        notes["thinned"] = f"{len(drawn.steps):,} of {len(steps):,}"
    return drawn, notes


def _layout(go: Any, panel: Panel, values: Sequence[float]) -> Any:
    vertical: dict[str, Any] = {"title": {"text": panel.unit, "standoff": 8}, "automargin": "left", "fixedrange": True}
    if panel.scale == "log2":
        vertical |= {"type": "log", **_powers(values)}
    elif panel.scale == "log":
        vertical |= {"type": "log", "exponentformat": "power", "dtick": _decades(values)}
    elif panel.scale == "share":
        vertical |= {"tickformat": ".0%"}
    elif panel.stepped and max(values) - min(values) < _TICKS:
        vertical |= {"dtick": 1}  # counts have no halves
    if panel.from_zero:
        vertical |= {"rangemode": "tozero"}
    return go.Layout(
        template=go.layout.Template(),
        xaxis={"title": {"text": "step", "standoff": 6}, "tickformat": ",d"},
        yaxis=vertical,
        yaxis2={"overlaying": "y", "range": [0, 1], "visible": False, "fixedrange": True},
        # The page has legends of its own: they wrap on a phone without taking the chart's room.
        showlegend=False,
        hovermode="x unified",
        margin={"l": 8, "r": 14, "t": 18, "b": 42},
    )


def _powers(values: Sequence[float]) -> dict[str, Any]:
    """Ticks at powers of two, about seven of them."""
    low, high = math.floor(math.log2(min(values))), math.ceil(math.log2(max(values)))
    stride = max(1, math.ceil((high - low) / _TICKS))
    # A power beyond a double's range has no tick.
    exponents = [e for e in range(low - stride, high + 2 * stride, stride) if -1022 <= e <= 1023]
    return {"tickvals": [2.0**e for e in exponents], "ticktext": [f"2<sup>{e}</sup>" for e in exponents]}


def _decades(values: Sequence[float]) -> int | str | None:
    """Ticks at 1, 2 and 5 over a few decades, at every decade over more; Plotly's own choice within one."""
    decades = math.log10(max(values)) - math.log10(min(values))
    if not 1 < decades < _TICKS:
        return None
    return "D2" if decades < _FEW_DECADES else 1


def _latest(panel: Panel, series: Series) -> str:
    value = series.values[-1]
    if value is None:
        return "last reading not finite"
    if panel.scale == "share":
        return f"last {value:.1%}"
    return f"last {power_of_two(value) if panel.scale == 'log2' else number(value)}"
