"""What stands on a chart: curves, crosses where there was no number, and the marks of alerts.

Every trace carries in ``meta`` its role, the name of its colour in the page's style, and the run it belongs to.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from lightning_mp.monitor.report.load import Run, Series
from lightning_mp.monitor.report.panels import Panel

#: Alerts marked on one chart; the table has more.
MAX_MARKS = 300
#: So few readings are drawn with a dot each.
_FEW = 40
#: So many marks are drawn smaller.
_CROWD = 40
_SYMBOLS = {"error": "triangle-down", "warning": "diamond", "info": "circle-open"}
# Curves that coincide stay visible: a later one is dashed over an earlier; colour is not all that tells them apart.
_DASHES = ("solid", "dash", "dot", "dashdot", "longdash")
_HOVER = {"share": "%{y:.1%}", "linear": "%{y:.5~g}", "log": "%{y:.4~g}", "log2": "%{y:,.6~g}"}
_MOST_TOLD = 160


def dash(style: int) -> str:
    """How line number ``style`` of a chart, or run number ``style`` of a comparison, is dashed."""
    return _DASHES[style % len(_DASHES)]


def curve(go: Any, panel: Panel, drawn: Series, name: str, *, run: int, style: int) -> Any:
    """The line through the readings, with gaps where there is none and where the steps go back."""
    steps, values = _with_breaks(drawn)
    few = len(drawn.steps) <= _FEW and not panel.stepped
    alone = _alone(values)
    return go.Scatter(
        x=steps,
        y=values,
        name=escape(name),
        mode="lines+markers" if few or any(alone) else "lines",
        line={"width": 1.8, "dash": dash(style), "shape": "hv" if panel.stepped else "linear"},
        marker={"size": 4 if few else [5 if single else 0 for single in alone]} if few or any(alone) else None,
        hovertemplate=_HOVER[panel.scale],
        connectgaps=False,
        meta={"role": "curve", "colour": f"run-{style}", "run": run},
    )


def gaps(go: Any, drawn: Series, name: str, *, run: int, style: int) -> list[Any]:
    """A cross at the bottom for every reading that has no place on the axis."""
    steps = [step for step, value in zip(drawn.steps, drawn.values, strict=True) if value is None]
    if not steps:
        return []
    cross = go.Scatter(
        x=steps,
        y=[0.0] * len(steps),
        yaxis="y2",
        mode="markers",
        marker={"symbol": "x-thin", "size": _size(8, steps)},
        cliponaxis=False,
        name=escape(name),
        text=["no number"] * len(steps),
        hovertemplate="%{text}",
        meta={"role": "gap", "colour": f"run-{style}", "run": run},
    )
    return [cross]


def marks(go: Any, panel: Panel, run: Run, place: int, *, many: bool) -> list[Any]:
    """Alerts as lines from top to bottom with a symbol a severity; ordinary overflows only where they belong."""
    shown = [event for event in run.events if event.is_alert or panel.overflows]
    shown = sorted(shown, key=lambda event: (event.severity == "info", event.severity == "warning"))[:MAX_MARKS]
    traces: list[Any] = []
    for severity, symbol in _SYMBOLS.items():
        events = [event for event in shown if event.severity == severity]
        if not events:
            continue
        steps = [event.step for event in events]
        meta = {"role": severity, "colour": f"run-{place}" if many else severity, "run": place}
        common = {"yaxis": "y2", "meta": meta}
        if severity != "info":
            upright = [point for step in steps for point in (step, step, None)]
            line = {"width": 1, "dash": "dot"}
            heights = [0, 1, None] * len(steps)
            traces.append(go.Scatter(x=upright, y=heights, mode="lines", line=line, hoverinfo="skip", **common))
        traces.append(
            go.Scatter(
                x=steps,
                y=[1.0] * len(steps),
                mode="markers",
                marker={"symbol": symbol, "size": _size(7 if severity == "info" else 10, steps)},
                cliponaxis=False,
                name=severity,
                text=[_told(str(event), run.name if many else "") for event in events],
                hovertemplate="%{text}<extra></extra>",
                **common,
            )
        )
    return traces


def _with_breaks(drawn: Series) -> tuple[list[int | None], list[float | None]]:
    steps: list[int | None] = []
    values: list[float | None] = []
    last: int | None = None
    for step, value in zip(drawn.steps, drawn.values, strict=True):
        if last is not None and step < last:
            steps.append(None)
            values.append(None)
        steps.append(step)
        values.append(value)
        last = step
    return steps, values


def _alone(values: Sequence[float | None]) -> list[bool]:
    """Which readings have none beside them, so that a line would not show them."""
    around = [None, *values, None]
    return [
        value is not None and before is None and after is None
        for before, value, after in zip(around, values, around[2:], strict=False)
    ]


def _size(wanted: int, crowd: Sequence[int]) -> int:
    return wanted if len(crowd) <= _CROWD else wanted - 3


def _told(event: str, run: str) -> str:
    text = f"{run}, {event}" if run else event
    return escape(text if len(text) <= _MOST_TOLD else f"{text[:_MOST_TOLD]}…")
