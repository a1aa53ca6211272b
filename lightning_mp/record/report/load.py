"""A run's folder as it is on disk. A damaged file costs its damaged lines, never the report."""

import json
import math
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning_mp.record.events import Event
from lightning_mp.record.metric_names import STEP
from lightning_mp.record.run_folder import AUDIT, EVENTS, METRICS, RUN

#: What a run writes, and a report reads.
FILES = (METRICS, EVENTS, RUN, AUDIT)


@dataclass(slots=True)
class Series:
    """The readings of one name in the order they were written; ``None`` is one that is not finite or not known."""

    steps: list[int] = field(default_factory=list[int])
    values: list[float | None] = field(default_factory=list["float | None"])

    def add(self, step: int, value: float | None) -> None:
        """Append a reading."""
        self.steps.append(step)
        self.values.append(value if value is None or math.isfinite(value) else None)

    @property
    def finite(self) -> list[float]:
        """The readings that are numbers."""
        return [value for value in self.values if value is not None]


@dataclass(slots=True)
class Run:
    """What one folder holds. ``faults`` says, a sentence each, what of it could not be read."""

    path: Path
    name: str
    series: dict[str, Series] = field(default_factory=dict[str, Series])
    events: list[Event] = field(default_factory=list[Event])
    audit: list[dict[str, Any]] | None = None
    about: dict[str, Any] = field(default_factory=dict[str, Any])
    faults: list[str] = field(default_factory=list[str])

    @property
    def last_step(self) -> int | None:
        """The highest step with a reading."""
        return max((max(series.steps) for series in self.series.values()), default=None)

    @property
    def alerts(self) -> list[Event]:
        """The events that someone should look at."""
        return [event for event in self.events if event.is_alert]

    def finite(self, name: str) -> list[float]:
        """The numbers among the readings of ``name``."""
        return self.series[name].finite if name in self.series else []


def is_run(path: Path) -> bool:
    """Whether a run wrote anything there."""
    return any((path / name).is_file() for name in FILES)


def load(path: Path, name: str) -> Run:
    """Read the folder ``path``; ``name`` is what the report calls the run."""
    run = Run(path, name)
    for row in _lines(run, METRICS):
        step = row.pop(STEP)
        for reading, value in row.items():
            run.series.setdefault(reading, Series()).add(step, value)
    if not run.series:
        run.faults.append(f"{METRICS} holds no reading yet" if (path / METRICS).exists() else f"{METRICS} is missing")
    run.events = [Event(**row) for row in _lines(run, EVENTS)]
    run.about = _document(run, RUN)
    run.audit = _document(run, AUDIT).get("rows")
    return run


def _lines(run: Run, name: str) -> list[dict[str, Any]]:
    """Every line of JSON; a run that was killed leaves one that is cut off, which is said."""
    path, rows = run.path / name, list[Any]()
    lines = path.read_bytes().splitlines() if path.is_file() else []
    for line in lines:
        with suppress(ValueError):
            row: Any = json.loads(line)
            rows += [row] if isinstance(row, dict) and STEP in row else []
    if len(rows) < len(lines):
        run.faults.append(f"{name} is damaged: {len(lines) - len(rows):,} of {len(lines):,} lines cannot be read")
    return rows


def _document(run: Run, name: str) -> dict[str, Any]:
    """A whole file of JSON; empty where it is not there or cannot be read."""
    path = run.path / name
    try:
        return json.loads(path.read_bytes()) if path.is_file() else {}
    except ValueError:
        run.faults.append(f"{name} is damaged and left out")
        return {}
