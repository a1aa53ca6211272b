"""Which charts a report has, and each of them as the traces and the layout that Plotly's script draws.

Every trace carries in ``meta`` its role, the name of its colour in the page's style, and the run it belongs to: the
page knows whether it is dark, and which runs are hidden.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice, pairwise
from textwrap import shorten
from typing import Any, Literal

from markupsafe import escape

from lightning_mp.monitor import metric_names as names
from lightning_mp.monitor.report.load import Run, Series
from lightning_mp.monitor.report.summary import number, power_of_two

#: lines of one run that a chart can hold and still be read
MAX_LINES = 10
#: points a series may have, about two for every pixel of a wide chart; alerts marked on a chart
MAX_POINTS, MAX_MARKS = 3000, 300
Scale = Literal["linear", "log", "log2", "share"]

# Up to so many readings have a dot each, and up to so many marks their full size.
_FEW = 40
_TICKS = 7
_SYMBOLS = {"error": "triangle-down", "warning": "diamond", "info": "circle-open"}
# Curves that coincide stay visible: a later one is dashed over an earlier; colour is not all that tells them apart.
_DASHES = ("solid", "dash", "dot", "dashdot", "longdash")
_HOVER = {"share": "%{y:.1%}", "linear": "%{y:.5~g}", "log": "%{y:.4~g}", "log2": "%{y:,.6~g}"}


@dataclass(frozen=True, slots=True)
class Panel:
    """A chart over steps; ``lines`` has the label of each reading, ``unit`` is the vertical axis's title.

    Of the ``traits``, ``stepped`` holds a value until the next reading; ``grouped`` adds every reading whose name goes
    on after the first line's (``health/fp8_amax/layer input``); ``from-zero`` keeps the axis honest about differences;
    ``overflows`` marks ordinary overflows too.
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
    Panel("Lost updates", "share rounded away", {names.LOST_UPDATES: "half-precision weights"}, "share", "from-zero"),
    Panel(
        "FP8: values flushed to zero",
        "share of values",
        {names.FP8_FLUSHED: "largest of all layers"},
        "share",
        "grouped from-zero",
    ),
    Panel("FP8: largest magnitudes", "amax", {names.FP8_AMAX: "all layers"}, "log", "grouped"),
    Panel("FP8: scales", "factor on the operand", {names.FP8_SCALE: "all layers"}, "log2", "stepped grouped"),
    Panel("Loss scale", "factor on the loss", {names.LOSS_SCALE: "loss scale"}, "log2", "stepped overflows"),
    Panel(
        "Skipped steps",
        "steps",
        {names.SKIPPED_STEPS: "in total", names.SKIPPED_IN_A_ROW: "in a row"},
        traits="stepped overflows",
    ),
    Panel("Learning rate", "learning rate", {names.LR: "learning rate"}),
    Panel("Tokens per second", "tokens / s", {names.TOKENS_PER_S: "tokens"}, traits="from-zero"),
    Panel("Samples per second", "samples / s", {names.SAMPLES_PER_S: "samples"}, traits="from-zero"),
    Panel("Model FLOPs utilisation", "share of the device's peak", {names.MFU: "MFU"}, "share", "from-zero"),
    Panel(
        "Memory",
        "GiB",
        {names.MEMORY_PEAK: "peak", names.MEMORY_ALLOCATED: "allocated", names.MEMORY_RESERVED: "reserved"},
        traits="from-zero",
    ),
)


def lay_out(runs: Sequence[Run]) -> list[Panel]:
    """The charts of what ``runs`` recorded; where several are compared, one for each line."""
    found = list(dict.fromkeys(name for run in runs for name, series in run.series.items() if series.finite))
    panels: list[Panel] = []
    for panel in KNOWN:
        first = next(iter(panel.lines))
        members = {name: name.removeprefix(f"{first}/") for name in found if name.startswith(f"{first}/")}
        own = {name: label for name, label in panel.lines.items() if name in found}
        if len(runs) == 1:
            lines = islice({**own, **(members if "grouped" in panel.traits else {})}.items(), MAX_LINES)
            panels.append(replace(panel, lines=dict(lines)))
            continue
        for name, label in own.items():
            title = panel.title if name == first else f"{panel.title}, {label}"
            panels.append(replace(panel, lines={name: label}, title=title))
    return [panel for panel in panels if panel.lines]


# ---------------------------------------------------------------------- one chart


def draw(panel: Panel, runs: Sequence[Run]) -> dict[str, Any]:
    """The chart of ``panel`` for every run that recorded something of it, as plain values for the page's script.

    ``switchable`` charts can have a linear or a logarithmic axis, as the reader likes.
    """
    many = len(runs) > 1
    found = [
        (place, place if many else index, run.name if many else label, run.series[name])
        for place, run in enumerate(runs)
        for index, (name, label) in enumerate(panel.lines.items())
        if run.finite(name)
    ]
    logarithmic = panel.scale in ("log", "log2")
    if logarithmic and max(value for *_, series in found for value in series.finite) <= 0:
        panel, logarithmic = replace(panel, scale="linear"), False
    traces: list[dict[str, Any]] = []
    values: list[float] = []
    for place, style, name, series in found:
        # what is not positive has no place on a logarithmic axis
        placed = [None if logarithmic and value is not None and value <= 0 else value for value in series.values]
        drawn = thin(Series(series.steps, placed))
        traces += _line(panel, drawn, str(escape(name)), {"run": place, "colour": f"run-{style}"}, dash(style))
        values += drawn.finite
    traces += [mark for place, run in enumerate(runs) for mark in _marks(panel, run, place, many)]
    return {
        "key": panel.title,
        "title": panel.title,
        "unit": panel.unit,
        "latest": "" if many else _latest(panel, found[0][3].values[-1]),
        "switchable": panel.scale in ("linear", "log") and min(values) > 0,
        "data": traces,
        "layout": {"yaxis": _axis(panel, values)},
    }


def dash(style: int) -> str:
    """How line number ``style`` of a chart, or run number ``style`` of a comparison, is dashed."""
    return _DASHES[style % len(_DASHES)]


def thin(series: Series, limit: int = MAX_POINTS) -> Series:
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


def _line(panel: Panel, drawn: Series, name: str, meta: dict[str, Any], dashed: str) -> list[dict[str, Any]]:
    """The line through the readings, broken where one is not finite: there it has a cross."""
    stepped = "stepped" in panel.traits
    few = len(drawn.steps) <= _FEW and not stepped
    curve: dict[str, Any] = {
        "x": drawn.steps,
        "y": drawn.values,
        "name": name,
        "mode": "lines+markers" if few else "lines",
        "line": {"width": 1.8, "dash": dashed, "shape": "hv" if stepped else "linear"},
        **({"marker": {"size": 4}} if few else {}),
        "hovertemplate": _HOVER[panel.scale],
        "connectgaps": False,
        "meta": {"role": "curve", **meta},
    }
    gaps = [step for step, value in zip(drawn.steps, drawn.values, strict=True) if value is None]
    cross = _symbols(gaps, 0.0, "x-thin", 8, ["no number"] * len(gaps), {"role": "gap", **meta})
    return [curve, {**cross, "name": name, "hovertemplate": "%{text}"}] if gaps else [curve]


def _marks(panel: Panel, run: Run, place: int, many: bool) -> Iterator[dict[str, Any]]:
    """Alerts as lines from top to bottom with a symbol a severity; ordinary overflows only where they belong."""
    left = MAX_MARKS
    for severity, symbol in _SYMBOLS.items():
        notice = severity == "info"
        events = [event for event in run.events if event.severity == severity][:left]
        left -= len(events)
        if not events or (notice and "overflows" not in panel.traits):
            continue
        steps = [event.step for event in events]
        meta = {"role": severity, "colour": f"run-{place}" if many else severity, "run": place}
        if not notice:
            line = {"x": [point for step in steps for point in (step, step, None)], "y": [0, 1, None] * len(steps)}
            dotted = {"mode": "lines", "line": {"width": 1, "dash": "dot"}, "hoverinfo": "skip"}
            yield {**line, **dotted, "yaxis": "y2", "meta": meta}
        texts = [shorten(f"{run.name}, {event}" if many else str(event), 160, placeholder="…") for event in events]
        texts = [str(escape(text)) for text in texts]
        yield {**_symbols(steps, 1.0, symbol, 7 if notice else 10, texts, meta), "name": severity}


def _symbols(
    steps: Sequence[int], height: float, symbol: str, size: int, texts: Sequence[str], meta: Mapping[str, Any]
) -> dict[str, Any]:
    """Symbols at ``height`` of the plot, 0 to 1; smaller where there are many."""
    return {
        "x": steps,
        "y": [height] * len(steps),
        "yaxis": "y2",
        "mode": "markers",
        "marker": {"symbol": symbol, "size": size if len(steps) <= _FEW else size - 3},
        "cliponaxis": False,
        "text": texts,
        "hovertemplate": "%{text}<extra></extra>",
        "meta": meta,
    }


def _axis(panel: Panel, values: Sequence[float]) -> dict[str, Any]:
    axis: dict[str, Any] = {"title": {"text": panel.unit, "standoff": 8}, "automargin": "left", "fixedrange": True}
    if panel.scale == "log2":
        axis |= {"type": "log", **_powers(values)}
    elif panel.scale == "log":
        axis |= {"type": "log", "exponentformat": "power"}
    elif panel.scale == "share":
        axis |= {"tickformat": ".0%"}
    elif "stepped" in panel.traits and max(values) - min(values) < _TICKS:
        axis |= {"dtick": 1}  # counts have no halves
    return axis | ({"rangemode": "tozero"} if "from-zero" in panel.traits else {})


def _powers(values: Sequence[float]) -> dict[str, Any]:
    """Ticks at powers of two, about seven of them."""
    low, high = math.floor(math.log2(min(values))), math.ceil(math.log2(max(values)))
    stride = max(1, math.ceil((high - low) / _TICKS))
    # A power beyond a double's range has no tick.
    exponents = [e for e in range(low - stride, high + 2 * stride, stride) if -1022 <= e <= 1023]
    return {"tickvals": [2.0**e for e in exponents], "ticktext": [f"2<sup>{e}</sup>" for e in exponents]}


def _latest(panel: Panel, value: float | None) -> str:
    if value is None:
        return "last reading not finite"
    if panel.scale == "share":
        return f"last {value:.1%}"
    return f"last {power_of_two(value) if panel.scale == 'log2' else number(value)}"
