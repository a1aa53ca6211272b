"""The parts of the page that are text and tables."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lightning_mp.monitor.events import Event
from lightning_mp.monitor.report.compared import coverage
from lightning_mp.monitor.report.load import Run
from lightning_mp.monitor.report.markup import Html, dotted, facts, folded, join, table, tag
from lightning_mp.monitor.report.numbers import counted, moment, plain
from lightning_mp.monitor.report.summary import comparison, state, swatch, tiles
from lightning_mp.monitor.run_folder import PIPELINE_PICTURE

#: Rows of one table; a page with more of them would be slow on a phone.
MAX_ROWS = 300
_ALERTS_SHOWN = 5
_ROLES, _NUMBERS = ("input", "weight", "gradient"), ("flushed", "amax", "scale")
_AUDIT = ("module", "declared", "param", "input", "output", "compute", "grad", "reduce", "optimizer_state")
_NO_ALERTS = "None were written."


def sections(
    runs: Sequence[Run], left_out: Sequence[str], title: Sequence[str], not_run: Mapping[str, str]
) -> dict[str, Html]:
    """Every part by its place in the page; an empty one takes no room there."""
    return {
        "head": _head(runs, title),
        "faults": _faults(runs),
        "summary": tiles(runs[0]) if len(runs) == 1 else comparison(runs, not_run),
        "alerts": _alerts(runs),
        "fp8": _fp8(runs),
        "findings": _findings(runs),
        "coverage": coverage(runs) if len(runs) > 1 else Html(""),
        "pipeline": _pipelines(runs),
        "audit": _audits(runs),
        "about": _about(runs),
        "missing": _missing(runs, left_out),
    }


def _head(runs: Sequence[Run], title: Sequence[str]) -> Html:
    if len(runs) > 1:
        head, *lines = title or [f"{len(runs)} runs compared"]
        return join([tag("h1", head), *(tag("p", line, class_="quiet") for line in lines)])
    run = runs[0]
    machine = _dict(run.about.get("machine"))
    words = [machine.get("device"), run.about.get("precision"), run.about.get("strategy")]
    line = [str(word) for word in words if word] + ([f"step {run.last_step:,}"] if run.last_step is not None else [])
    if run.about.get("at"):
        line.append(f"{'as of' if run.about.get('status') == 'running' else 'ended'} {moment(str(run.about['at']))}")
    return join([tag("h1", run.name, " ", state(run)), tag("p", " · ".join(line), class_="quiet") if line else None])


def _faults(runs: Sequence[Run]) -> Html:
    failed = [
        tag("p", tag("strong", f"{_of(run, runs)}The run failed: "), plain(run.about.get("error")))
        for run in runs
        if run.about.get("status") == "failed"
    ]
    unreadable = [tag("li", f"{_of(run, runs)}{fault}") for run in runs for fault in run.faults]
    return join(
        [
            tag("div", *failed, class_="notice error") if failed else None,
            tag("div", tag("p", tag("strong", "Not all of it could be read")), tag("ul", *unreadable), class_="notice")
            if unreadable
            else None,
        ]
    )


def _alerts(runs: Sequence[Run]) -> Html:
    alerts = [(place, event) for place, run in enumerate(runs) for event in run.events if event.is_alert]
    notices = [(place, event) for place, run in enumerate(runs) for event in run.events if not event.is_alert]
    alerts.sort(key=lambda item: item[1].step)
    first, rest = alerts[:_ALERTS_SHOWN], alerts[_ALERTS_SHOWN:]
    return join(
        [
            tag("h2", "Alerts"),
            _events(first, runs) if first else tag("p", _NO_ALERTS, class_="quiet"),
            folded(f"{counted(len(rest), 'more alert')}", _events(rest, runs), "more-alerts") if rest else None,
            folded(
                f"{counted(len(notices), 'notice')}, ordinary overflows among them", _events(notices, runs), "notices"
            )
            if notices
            else None,
        ]
    )


def _events(events: Sequence[tuple[int, Event]], runs: Sequence[Run]) -> Html:
    many = len(runs) > 1
    heads = [*(["run"] if many else []), "severity", "step", "what and where", "evidence", "likely cause", "do", "done"]
    rows = [
        [
            *([tag("span", swatch(place), runs[place].name, class_="run")] if many else []),
            _severity(event.severity),
            tag("button", f"{event.step:,}", type="button", data_step=str(event.step), title="show on the charts"),
            _where(event),
            _evidence(event),
            event.cause or "-",
            event.advice or "-",
            "logged" if event.action == "log" else event.action,
        ]
        for place, event in events[:MAX_ROWS]
    ]
    return join([tag("div", table(heads, rows), class_="stacked"), _more(len(events))])


def _where(event: Event) -> Html:
    places = [f"rank {event.rank}"] if event.rank is not None else []
    return join(
        [
            tag("strong", event.kind.replace("_", " ")),
            *(tag("span", place, class_="pair") for place in places),
            *(tag("span", dotted(place), class_="pair") for place in (event.module, event.parameter) if place),
        ]
    )


def _evidence(event: Event) -> Html:
    known = event.value is None or event.value in event.evidence.values()
    pairs = [] if known else [("value", event.value)]
    found = [*pairs, *((str(key).replace("_", " "), value) for key, value in event.evidence.items())]
    return (
        join(tag("span", f"{key} {plain(value)}", class_="pair short") for key, value in found) if found else Html("-")
    )


def _fp8(runs: Sequence[Run]) -> Html:
    parts = [join([_titled(run, runs), _fp8_of(run)]) for run in runs if run.fp8 or run.about.get("fp8_layers")]
    return join([tag("h2", "FP8, layer by layer"), *parts]) if parts else Html("")


def _fp8_of(run: Run) -> Html:
    """A row a layer: whether it runs in FP8, and of each operand the most that was flushed, its last amax and scale."""
    layers: list[Any] = run.about["fp8_layers"] if isinstance(run.about.get("fp8_layers"), list) else []
    listed = [_dict(layer) for layer in layers]
    rest = dict.fromkeys(name for name, _, _ in run.fp8 if name not in [layer.get("name") for layer in listed])
    rows = [
        [
            dotted(plain(layer.get("name"))),
            plain(layer.get("shape")),
            "fp8" if layer.get("converted", True) else f"bf16: {layer.get('reason')}",
            *(_operand(run, str(layer.get("name")), role) for role in _ROLES),
        ]
        for layer in (*listed, *({"name": name} for name in rest))
    ]
    heads = ["layer", "shape", "runs in", *_ROLES]
    said = "Of each operand: the largest share flushed to zero, then the last amax and scale."
    found = join([tag("div", table(heads, rows[:MAX_ROWS]), class_="stacked"), _more(len(rows))])
    return join([tag("p", said, class_="quiet"), found])


def _operand(run: Run, layer: str, role: str) -> Html:
    numbers = {name: run.fp8[layer, role, name].finite for name in _NUMBERS if (layer, role, name) in run.fp8}
    if not all(numbers.get(name) for name in _NUMBERS):
        return Html("-")
    words = (f"{max(numbers['flushed']):.2%}", plain(numbers["amax"][-1]), plain(numbers["scale"][-1]))
    return join(tag("span", word, class_="pair short") for word in words)


def _findings(runs: Sequence[Run]) -> Html:
    parts: list[Html] = []
    for run in runs:
        if run.findings is None:
            continue
        rows = [
            [
                _severity(str(row.get("severity"))),
                tag("code", plain(row.get("code") or row.get("name"))),
                plain(row.get("what")),
                dotted(plain(row.get("where"))),
                plain(row.get("why")),
                plain(row.get("fix")),
            ]
            for row in run.findings[:MAX_ROWS]
        ]
        heads = ["severity", "code", "what", "where", "why", "do"]
        parts.append(_titled(run, runs))
        parts.append(
            tag("div", table(heads, rows), class_="stacked") if rows else tag("p", "Nothing found.", class_="quiet")
        )
        parts.append(_more(len(run.findings)))
    return join([tag("h2", "What the doctor found before the run"), *parts]) if parts else Html("")


def _pipelines(runs: Sequence[Run]) -> Html:
    parts: list[Html] = []
    for run in runs:
        picture = run.path / PIPELINE_PICTURE
        if picture.is_file():
            # as an image it can neither run a script nor fetch anything
            source = f"data:image/svg+xml;base64,{base64.b64encode(picture.read_bytes()).decode()}"
            alt = "a row a rank, time to the right, each box a micro-batch in a stage"
            parts += [_titled(run, runs), tag("img", src=source, alt=alt, class_="schedule")]
    return join([tag("h2", "The pipeline's schedule, as its second step ran"), *parts]) if parts else Html("")


def _audits(runs: Sequence[Run]) -> Html:
    parts = [_audit(place, run, runs) for place, run in enumerate(runs) if run.audit is not None]
    return join([tag("h2", "Precision audit: dtypes declared and seen"), *parts]) if parts else Html("")


def _audit(place: int, run: Run, runs: Sequence[Run]) -> Html:
    rows: list[dict[str, Any]] = (run.audit or {}).get("rows", [])
    wrong = [row for row in rows if row.get("ok") is False]
    verdict = f"{counted(len(wrong), 'module')} of {len(rows):,} not as declared"
    if not wrong:
        verdict = f"All {counted(len(rows), 'module')} as declared."
    right = [row for row in rows if row.get("ok") is not False]
    return join(
        [
            _titled(run, runs),
            tag("p", verdict, class_="bad" if wrong else "quiet"),
            _audit_rows(wrong) if wrong else None,
            folded(f"{counted(len(right), 'module')} as declared", _audit_rows(right), f"audit-{place}")
            if right
            else None,
        ]
    )


def _audit_rows(rows: Sequence[Mapping[str, Any]]) -> Html:
    heads = [name.replace("_", " ") for name in _AUDIT]
    cells = [[dotted(plain(row.get(name))) for name in _AUDIT] for row in rows[:MAX_ROWS]]
    return join([tag("div", table(heads, cells), class_="stacked dtypes"), _more(len(rows))])


def _about(runs: Sequence[Run]) -> Html:
    parts = [_about_one(place, run, runs) for place, run in enumerate(runs) if run.about]
    return join([tag("h2", "Machine, versions and plan"), *parts]) if parts else Html("")


def _about_one(place: int, run: Run, runs: Sequence[Run]) -> Html:
    about = dict(run.about)
    groups = [(name, _dict(about.pop(name, None))) for name in ("machine", "versions", "trainer")]
    plan, _ = about.pop("plan", None), about.pop("fp8_layers", None)
    general = {"folder": str(run.path), **{name: about[name] for name in about if name not in ("status", "error")}}
    blocks = [
        tag("div", tag("h3", name), facts(_readable(values))) for name, values in [("run", general), *groups] if values
    ]
    text = "none: a stock precision plugin" if plan is None else json.dumps(plan, indent=2, ensure_ascii=False)
    body = join([tag("div", *blocks, class_="blocks"), tag("h3", "plan"), tag("pre", tag("code", text))])
    return body if len(runs) == 1 else folded(run.name, body, f"about-{place}")


def _readable(values: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    for name, value in values.items():
        if name == "at":
            yield "written", moment(str(value))
        elif name.endswith("_bytes") and isinstance(value, (int, float)):
            yield name.removesuffix("_bytes"), f"{value / 2**30:.1f} GiB"
        else:
            yield name.replace("_", " "), plain(value)


def _missing(runs: Sequence[Run], left_out: Sequence[str]) -> Html:
    lines = list(left_out)
    for what, absent in (
        ("Precision audit: not run (PrecisionAudit writes it)", [run for run in runs if run.audit is None]),
        ("Doctor: no findings.json was written", [run for run in runs if run.findings is None]),
    ):
        if absent and len(runs) == 1:
            lines.append(what)
        elif 0 < len(absent) < len(runs):
            lines.append(f"{what}, in {', '.join(run.name for run in absent)}")
    if not lines:
        return Html("")
    return join([tag("h2", "Not in this report"), tag("ul", *(tag("li", line) for line in lines), class_="quiet")])


def _titled(run: Run, runs: Sequence[Run]) -> Html:
    return tag("h3", run.name) if len(runs) > 1 else Html("")


def _of(run: Run, runs: Sequence[Run]) -> str:
    return f"{run.name}: " if len(runs) > 1 else ""


def _severity(severity: str) -> Html:
    return tag("span", severity, class_=f"severity {severity}")


def _more(count: int) -> Html:
    return tag("p", f"{count - MAX_ROWS:,} more are not shown.", class_="quiet") if count > MAX_ROWS else Html("")


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
