"""A run's folder as it is found on disk, whatever state its files are in: nothing in them stops the reading."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from lightning_mp.monitor.events import SEVERITIES, Event, Kind
from lightning_mp.monitor.metric_names import FP8_AMAX, FP8_FLUSHED, FP8_SCALE, STEP
from lightning_mp.monitor.run_folder import AUDIT, EVENTS, FINDINGS, FP8, METRICS, RUN

#: What a run writes, and a report reads.
FILES = (METRICS, EVENTS, FP8, RUN, AUDIT, FINDINGS)
#: Integers above this are no longer exact in a float, which is what a browser has.
_MAX_STEP = 2**53
_LINES_NAMED = 5
_OPERANDS_DRAWN = 8


@dataclass(slots=True)
class Series:
    """The readings of one name in the order they were written; ``None`` is one that is not finite or not known."""

    steps: list[int] = field(default_factory=list[int])
    values: list[float | None] = field(default_factory=list["float | None"])

    @property
    def finite(self) -> list[float]:
        """The readings that are numbers."""
        return [value for value in self.values if value is not None]

    @property
    def gaps(self) -> int:
        """How many are not."""
        return sum(value is None for value in self.values)


@dataclass(slots=True)
class Run:
    """What one folder holds. ``faults`` says, a sentence each, what of it could not be read.

    ``fp8`` has, by layer, role and name (``flushed``, ``amax``, ``scale``), what became of FP8's operands.
    """

    path: Path
    name: str
    series: dict[str, Series] = field(default_factory=dict[str, Series])
    events: list[Event] = field(default_factory=list[Event])
    audit: dict[str, Any] | None = None
    findings: list[dict[str, Any]] | None = None
    about: dict[str, Any] = field(default_factory=dict[str, Any])
    fp8: dict[tuple[str, str, str], Series] = field(default_factory=dict[tuple[str, str, str], Series])
    faults: list[str] = field(default_factory=list[str])

    @property
    def last_step(self) -> int | None:
        """The highest step with a reading."""
        return max((max(series.steps) for series in self.series.values() if series.steps), default=None)

    @property
    def alerts(self) -> list[Event]:
        """The events that someone should look at."""
        return [event for event in self.events if event.is_alert]


def is_run(path: Path) -> bool:
    """Whether a run wrote anything there."""
    return any((path / name).is_file() for name in FILES)


def load(path: Path, name: str) -> Run:
    """Read the folder ``path``; ``name`` is what the report calls the run."""
    run = Run(path, name)
    _read_lines(run, METRICS, lambda row: _take_reading(run, row))
    if not run.series and not run.faults:
        run.faults.append(f"{METRICS} holds no reading yet" if (path / METRICS).exists() else f"{METRICS} is missing")
    if (path / EVENTS).exists():
        _read_lines(run, EVENTS, lambda row: _take_event(run, row))
    if (path / FP8).exists():
        _read_lines(run, FP8, lambda row: _take_operands(run, row))
        _chart_operands(run)
    run.about = _mapping(run, RUN, _document(run, RUN)) or {}
    if not (path / RUN).exists():
        run.faults.append(f"{RUN} is missing: status, machine, versions and plan are unknown")
    run.audit = _mapping(run, AUDIT, _document(run, AUDIT))
    if run.audit is not None:
        run.audit["rows"] = _rows(run, AUDIT, run.audit.get("rows"))
    found = _document(run, FINDINGS)
    if found is not None:
        inner = cast("dict[str, Any]", found).get("findings") if isinstance(found, dict) else found
        run.findings = _rows(run, FINDINGS, inner)
    return run


def _read_lines(run: Run, name: str, take: Callable[[dict[str, Any]], None]) -> None:
    """Hand every line of JSON to ``take``, which raises ``ValueError`` for one it cannot use."""
    bad: list[int] = []
    number, raw = 0, b"\n"
    try:
        with (run.path / name).open("rb") as file:
            for number, raw in enumerate(file, start=1):
                if raw.strip():
                    try:
                        take(_object(raw))
                    except (ValueError, RecursionError):
                        bad.append(number)
    except FileNotFoundError:
        return
    except OSError as error:
        run.faults.append(f"{name} cannot be read: {error.strerror}")
        return
    if bad and bad[-1] == number and not raw.endswith(b"\n"):
        bad.pop()
        run.faults.append(f"{name}: its last line, {number}, is cut off")
    if bad:
        named = ", ".join(map(str, bad[:_LINES_NAMED])) + (", …" if len(bad) > _LINES_NAMED else "")
        count = f"{len(bad):,} of {number:,} lines" if number > 1 else "its only line"
        run.faults.append(f"{name}: {count} cannot be read (line {named})")


def _object(raw: bytes) -> dict[str, Any]:
    found = json.loads(raw.decode("utf-8"))
    if not isinstance(found, dict):
        raise ValueError("not an object")
    return cast("dict[str, Any]", found)


def _take_reading(run: Run, row: dict[str, Any]) -> None:
    step = _step(row.pop(STEP, None))
    for name, value in row.items():
        if value is None or (isinstance(value, (int, float)) and not isinstance(value, bool)):
            series = run.series.setdefault(name, Series())
            series.steps.append(step)
            series.values.append(_finite(value))
        else:
            fault = f"{METRICS}: {name!r} holds values that are no numbers; they are left out"
            if fault not in run.faults:
                run.faults.append(fault)


def _take_operands(run: Run, row: dict[str, Any]) -> None:
    step, layers = _step(row.get(STEP)), row.get("layers")
    try:
        found = [
            ((layer, role, name), value)
            for layer, roles in cast("dict[str, Any]", layers).items()
            for role, numbers in roles.items()
            for name, value in numbers.items()
            if isinstance(value, (int, float))
        ]
    except AttributeError:
        raise ValueError("no layers") from None
    for key, value in found:
        series = run.fp8.setdefault(key, Series())
        series.steps.append(step)
        series.values.append(_finite(value))


def _chart_operands(run: Run) -> None:
    """Put the operands that lost most, or whose scale moved most, among the series that are drawn."""

    def worth(place: tuple[str, str]) -> tuple[float, float]:
        lost = run.fp8[(*place, "flushed")].finite if (*place, "flushed") in run.fp8 else []
        scales = (
            [value for value in run.fp8[(*place, "scale")].finite if value > 0] if (*place, "scale") in run.fp8 else []
        )
        return max(lost, default=0.0), math.log(max(scales) / min(scales)) if scales else 0.0

    places = sorted(dict.fromkeys((layer, role) for layer, role, _ in run.fp8), key=worth, reverse=True)
    for layer, role in places[:_OPERANDS_DRAWN]:
        for name, family in (("flushed", FP8_FLUSHED), ("amax", FP8_AMAX), ("scale", FP8_SCALE)):
            if (layer, role, name) in run.fp8:
                run.series[f"{family}/{layer} {role}"] = run.fp8[layer, role, name]


def _take_event(run: Run, row: dict[str, Any]) -> None:
    severity, evidence, rank = row.get("severity"), row.get("evidence"), row.get("rank")
    texts = {name: row.get(name) for name in ("module", "parameter", "cause", "advice", "action")}
    run.events.append(
        Event(
            step=_step(row.get(STEP)),
            kind=cast("Kind", _text(row["kind"]) if "kind" in row else "event of no kind"),
            # An event whose severity cannot be read is shown rather than taken for harmless.
            severity=severity if severity in SEVERITIES else "warning",
            rank=rank if isinstance(rank, int) else None,
            module=_text(texts["module"]) or None,
            parameter=_text(texts["parameter"]) or None,
            value=_finite(row["value"]) if isinstance(row.get("value"), (int, float)) else None,
            evidence=cast("Mapping[str, Any]", evidence) if isinstance(evidence, dict) else {},
            cause=_text(texts["cause"]),
            advice=_text(texts["advice"]),
            action=_text(texts["action"]) or "log",
        )
    )


def _step(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not -_MAX_STEP <= value <= _MAX_STEP:
        raise ValueError("no step")
    if value != int(value):
        raise ValueError("a broken step")
    return int(value)


def _finite(value: float | None) -> float | None:
    try:
        return None if value is None or not math.isfinite(value) else float(value)
    except OverflowError:  # an integer beyond any float
        return None


def _text(value: Any) -> str:
    return "" if value is None else value if isinstance(value, str) else json.dumps(value)


def _document(run: Run, name: str) -> Any:
    """The whole file as JSON; ``None`` where it is not there or cannot be read, which ``run.faults`` then says."""
    try:
        found = json.loads((run.path / name).read_text(encoding="utf-8"))
        json.dumps(found, indent=2)  # what is nested too deep to be written again is too deep to be shown
    except FileNotFoundError:
        return None
    except OSError as error:
        run.faults.append(f"{name} cannot be read: {error.strerror}")
    except (ValueError, RecursionError):
        run.faults.append(f"{name} is cut off or no JSON")
    else:
        return found
    return None


def _mapping(run: Run, name: str, found: Any) -> dict[str, Any] | None:
    if isinstance(found, dict):
        return cast("dict[str, Any]", found)
    if found is not None:
        run.faults.append(f"{name} holds no JSON object")
    return None


def _rows(run: Run, name: str, found: Any) -> list[dict[str, Any]]:
    rows = [cast("dict[str, Any]", row) for row in found if isinstance(row, dict)] if isinstance(found, list) else []
    if not isinstance(found, list) or len(rows) < len(cast("list[Any]", found)):
        run.faults.append(f"{name}: some of its rows cannot be read, or none are there")
    return rows
