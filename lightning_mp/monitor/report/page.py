"""The page itself: text that is there at once, and beside it the charts as data, which the page's script draws."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_mp.errors import MissingExtraError
from lightning_mp.monitor.report.figures import draw
from lightning_mp.monitor.report.load import Run
from lightning_mp.monitor.report.markup import Html, join, tag
from lightning_mp.monitor.report.panels import lay_out
from lightning_mp.monitor.report.sections import sections
from lightning_mp.monitor.report.summary import swatch

_HERE = Path(__file__).parent
# The order of the page; the charts come after the alerts.
_BEFORE = ("head", "faults", "summary", "alerts")
_AFTER = ("pipeline", "fp8", "findings", "coverage", "audit", "about", "missing")
# For fingers, and for what a pointer does less exactly; the charts' own zoom works beside it.
_ZOOM = tag(
    "div",
    *(
        tag("button", sign, type="button", data_zoom=way, aria_label=meaning, title=meaning)
        for sign, way, meaning in (
            (Html("&minus;"), "out", "Show more steps"),
            ("+", "in", "Show fewer steps"),
            ("←", "left", "Earlier steps"),
            ("→", "right", "Later steps"),
            ("all", "all", "Show all steps"),
        )
    ),
    tag("span", id="steps", class_="quiet"),
    role="group",
    aria_label="Steps shown",
)


def payload(runs: Sequence[Run], title: Sequence[str] = (), not_run: Mapping[str, str] | None = None) -> dict[str, Any]:
    """All that changes while a run goes on: the text of every section, and the charts.

    Raises:
        MissingExtraError: plotly is not installed.
    """
    layout = lay_out(runs)
    steps = [step for run in runs for series in run.series.values() for step in series.steps]
    steps += [event.step for run in runs for event in run.alerts]
    return {
        "sections": sections(runs, layout.left_out, title, not_run or {}),
        "charts": [draw(panel, runs).to_dict() for panel in layout.panels],
        "steps": [min(steps), max(steps)] if steps else [0, 1],
        "running": any(run.about.get("status") == "running" for run in runs),
    }


def render(
    runs: Sequence[Run], *, live: bool = False, title: Sequence[str] = (), not_run: Mapping[str, str] | None = None
) -> str:
    """The whole page. ``live`` has it ask its server for news.

    Raises:
        MissingExtraError: plotly is not installed.
    """
    content = payload(runs, title, not_run)
    name = runs[0].name if len(runs) == 1 else [*title, f"{len(runs)} runs compared"][0]
    before, after = (
        [tag("section", content["sections"][name], id=name) for name in names] for names in (_BEFORE, _AFTER)
    )
    return document(
        f"{name} - training report", [*before, *charts(runs), *after], {**content, "sections": {}}, live=live
    )


def charts(runs: Sequence[Run]) -> list[Html]:
    """Where the page's script draws, and the buttons for what is shown."""
    return [
        tag("div", _switches(runs) if len(runs) > 1 else None, _ZOOM, class_="bar"),
        tag("section", id="charts", class_="charts"),
        tag("noscript", tag("p", "The charts need JavaScript; the tables do not.", class_="notice")),
    ]


def document(title: str, main: Sequence[Html], content: Mapping[str, Any], *, live: bool = False) -> str:
    """A page in the report's style, with nothing to fetch; ``content`` is what its script draws.

    Raises:
        MissingExtraError: plotly is not installed.
    """
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise MissingExtraError("plotly", "report", "the report's charts") from None
    head = tag(
        "head",
        Html('<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'),
        # Nothing may be fetched, whatever a run's files hold; a served page may ask its own server.
        Html(f'<meta http-equiv="Content-Security-Policy" content="{_policy(live)}">'),
        Html('<meta name="color-scheme" content="light dark"><link rel="icon" href="data:,">'),
        tag("title", title),
        tag("style", Html((_HERE / "page.css").read_text(encoding="utf-8"))),
    )
    body = tag(
        "body",
        tag("main", *main),
        _script(get_plotlyjs()),
        tag("script", Html(_safe(content)), type="application/json", id="payload"),
        _script((_HERE / "page.js").read_text(encoding="utf-8")),
        data_live=live,
    )
    return f'<!doctype html>\n<html lang="en">{head}{body}</html>\n'


def _switches(runs: Sequence[Run]) -> Html:
    """The legend of compared runs, for all charts at once; a press hides a run or brings it back."""
    buttons = [
        tag("button", swatch(place), run.name, type="button", data_hide=f"run {place}", aria_pressed="true")
        for place, run in enumerate(runs)
    ]
    return tag("div", join(buttons), role="group", aria_label="Runs shown")


def _script(code: str) -> Html:
    return Html(f"<script>{code}</script>")


def _safe(content: Mapping[str, Any]) -> str:
    """JSON that cannot end the element it stands in."""
    return json.dumps(dict(content), allow_nan=False).replace("<", "\\u003c")


def _policy(live: bool) -> str:
    own = "'self'" if live else "'none'"
    inline = "script-src 'unsafe-inline'; style-src 'unsafe-inline'"
    return f"default-src 'none'; {inline}; img-src data: blob:; connect-src {own}"
