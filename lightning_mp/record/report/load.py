"""Read a run's folder. Damaged lines and files are left out and reported, never raised."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from lightning_mp.record.events import Event
from lightning_mp.record.file_format import KEY, UPDATE, is_step, json_object, newer
from lightning_mp.record.metric_names import STEP
from lightning_mp.record.run_folder import AUDIT, EVENTS, METRICS, RUN

#: the files of a run that a report reads
FILES = (METRICS, EVENTS, RUN, AUDIT)
#: the parts of run.json that are mappings
_PARTS = ("machine", "versions", "plan")
T = TypeVar("T")


@dataclass(slots=True)
class Series:
    """The readings of one name in the order they were written. ``None`` is a value that is not finite or unknown."""

    steps: list[int] = field(default_factory=list[int])
    values: list[float | None] = field(default_factory=list["float | None"])

    def add(self, step: int, value: float | None) -> None:
        """Append a reading. A value that is not finite becomes ``None``."""
        self.steps.append(step)
        self.values.append(value if value is None or math.isfinite(value) else None)

    @property
    def finite(self) -> list[float]:
        """The finite values, in order."""
        return [value for value in self.values if value is not None]


@dataclass(slots=True)
class Run:
    """The content of a run's folder. ``faults`` names each part that could not be read."""

    path: Path
    name: str
    series: dict[str, Series] = field(default_factory=dict[str, Series])
    events: list[Event] = field(default_factory=list[Event])
    audit: list[dict[str, Any]] | None = None
    about: dict[str, Any] = field(default_factory=dict[str, Any])
    faults: list[str] = field(default_factory=list[str])

    @property
    def last_step(self) -> int | None:
        """The highest step with a reading, or ``None``."""
        return max((max(series.steps) for series in self.series.values()), default=None)

    @property
    def alerts(self) -> list[Event]:
        """The warnings and errors among the events."""
        return [event for event in self.events if event.is_alert]

    def finite(self, name: str) -> list[float]:
        """Return the finite readings of ``name``; an empty list if there are none."""
        return self.series[name].finite if name in self.series else []


def is_run(path: Path) -> bool:
    """True if the folder holds at least one file that a run writes."""
    return any((path / name).is_file() for name in FILES)


def load(path: Path, name: str) -> Run:
    """Return the run of the folder ``path``. ``name`` is its name in the report.

    Missing and damaged files are noted in the run's ``faults``.

    Raises:
        OSError: a file cannot be opened.
    """
    run = Run(path, name)
    for row in _lines(run, METRICS, _reading):
        step = row.pop(STEP)
        for reading, value in row.items():
            run.series.setdefault(reading, Series()).add(step, value)
    if not run.series:
        run.faults.append(f"{METRICS} holds no reading yet" if (path / METRICS).exists() else f"{METRICS} is missing")
    run.events = _lines(run, EVENTS, Event.from_dict)
    run.about = _document(run, RUN)
    for part in _PARTS:
        value = run.about.get(part)
        if value is not None and not isinstance(value, dict):
            run.faults.append(f"{RUN} is damaged: {part!r} is left out")
            run.about[part] = None
    audit = _document(run, AUDIT)
    if "rows" in audit:
        listed: Any = audit["rows"] if isinstance(audit["rows"], list) else [None]
        run.audit = [row for row in listed if _is_audit_row(row)]
        if len(run.audit) < len(listed):
            run.faults.append(f"{AUDIT} is damaged: {len(listed) - len(run.audit):,} rows cannot be read")
    return run


def _reading(row: dict[str, Any]) -> dict[str, Any] | None:
    """Return ``row`` if it has a step and numbers; else ``None``."""
    numbers = all(value is None or _is_number(value) for value in row.values())
    return row if numbers and is_step(row.get(STEP)) else None


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_audit_row(row: Any) -> bool:
    return isinstance(row, dict) and isinstance(row.get("module"), str) and isinstance(row.get("ok"), bool)  # pyright: ignore


def _lines(run: Run, name: str, read: Callable[[dict[str, Any]], T | None]) -> list[T]:
    """Return the result of ``read`` for each line of JSON. If the file is missing, the list is empty.

    A line is unreadable if it is no JSON object, or ``read`` returns ``None``. A killed run leaves
    a partial line. Unreadable lines, and lines of a newer format version, are left out and noted in
    the run's ``faults``.
    """
    path, rows, unread, too_new = run.path / name, list[T](), 0, ""
    lines = path.read_bytes().splitlines() if path.is_file() else []
    for line in lines:
        values = json_object(line)
        row = None
        if values is not None and (said := newer(values)):
            too_new = f"{said}: {UPDATE}"
            continue
        if values is not None:
            row = read(values)
        if row is None:
            unread += 1
        else:
            rows.append(row)
    if unread:
        run.faults.append(f"{name} is damaged: {unread:,} of {len(lines):,} lines cannot be read")
    if too_new:
        run.faults.append(f"{name} {too_new}")
    return rows


def _document(run: Run, name: str) -> dict[str, Any]:
    """Return the JSON object of a file; an empty dict if it is missing, damaged or of a newer version.

    A damaged or newer file is noted in the run's ``faults``.
    """
    path = run.path / name
    if not path.is_file():
        return {}
    values = json_object(path.read_bytes())
    if values is None:
        run.faults.append(f"{name} is damaged and left out")
        return {}
    if said := newer(values):
        run.faults.append(f"{name} {said}: {UPDATE}")
        return {}
    values.pop(KEY, None)
    return values
