"""A run's folder as it is on disk. A damaged file costs its damaged lines, never the report."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from lightning_mp.monitor.events import Event
from lightning_mp.monitor.metric_names import FP8_AMAX, FP8_FLUSHED, FP8_SCALE, STEP
from lightning_mp.monitor.run_folder import AUDIT, EVENTS, FINDINGS, FP8, METRICS, RUN

#: What a run writes, and a report reads.
FILES = (METRICS, EVENTS, FP8, RUN, AUDIT, FINDINGS)
_OPERANDS_DRAWN = 8
# What a line or a document that is cut off, or is no JSON of ours, may raise where it is read.
_DAMAGE = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)


@dataclass(slots=True)
class Series:
    """The readings of one name in the order they were written; ``None`` is one that is not finite or not known."""

    steps: list[int] = field(default_factory=list[int])
    values: list[float | None] = field(default_factory=list["float | None"])

    def add(self, step: int, value: float | None) -> None:
        """Append a reading."""
        self.steps.append(step)
        self.values.append(value)

    @property
    def finite(self) -> list[float]:
        """The readings that are numbers."""
        return [value for value in self.values if value is not None]


@dataclass(slots=True)
class Run:
    """What one folder holds. ``faults`` says, a sentence each, what of it could not be read.

    ``fp8`` has, by layer, operand and name (``flushed``, ``amax``, ``scale``), what became of FP8's operands.
    """

    path: Path
    name: str
    series: dict[str, Series] = field(default_factory=dict[str, Series])
    events: list[Event] = field(default_factory=list[Event])
    audit: list[dict[str, Any]] | None = None
    findings: list[dict[str, Any]] | None = None
    about: dict[str, Any] = field(default_factory=dict[str, Any])
    fp8: dict[tuple[str, str, str], Series] = field(default_factory=dict[tuple[str, str, str], Series])
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
    _read_lines(run, METRICS, _take_reading)
    if not run.series and not run.faults:
        run.faults.append(f"{METRICS} holds no reading yet" if (path / METRICS).exists() else f"{METRICS} is missing")
    _read_lines(run, EVENTS, lambda run, row: run.events.append(Event.from_dict({**row, STEP: int(row[STEP])})))
    _read_lines(run, FP8, _take_operands)
    _chart_operands(run)
    run.about = _document(run, RUN, dict[str, Any]) or {}
    if not (path / RUN).exists():
        run.faults.append(f"{RUN} is missing: status, machine, versions and plan are unknown")
    run.audit = _document(run, AUDIT, lambda found: _rows(found["rows"]))
    run.findings = _document(run, FINDINGS, lambda found: _rows(found["findings"]))
    return run


def _read_lines(run: Run, name: str, take: Callable[[Run, dict[str, Any]], None]) -> None:
    """Hand every line of JSON to ``take``; say how many lines could not be read."""
    if not (run.path / name).is_file():
        return
    lines = [line for line in (run.path / name).read_bytes().splitlines() if line.strip()]

    def damaged(line: bytes) -> bool:
        try:
            take(run, json.loads(line))
        except _DAMAGE:
            return True
        return False

    bad = sum(map(damaged, lines))
    if bad:
        run.faults.append(f"{name} is damaged: {bad:,} of {len(lines):,} lines cannot be read")


def _document(run: Run, name: str, take: Callable[[Any], Any]) -> Any:
    """What ``take`` makes of a whole file of JSON; ``None`` where it is not there or cannot be read."""
    if not (run.path / name).is_file():
        return None
    try:
        return take(json.loads((run.path / name).read_bytes()))
    except _DAMAGE:
        run.faults.append(f"{name} is damaged and left out")
        return None


def _rows(found: Any) -> list[dict[str, Any]]:
    return [dict(row) for row in cast("list[dict[str, Any]]", found)]


def _take_reading(run: Run, row: dict[str, Any]) -> None:
    step = int(row.pop(STEP))
    for name, value in {name: _finite(value) for name, value in row.items()}.items():
        run.series.setdefault(name, Series()).add(step, value)


def _take_operands(run: Run, row: dict[str, Any]) -> None:
    for layer, operands in row["layers"].items():
        for operand, numbers in operands.items():
            for name, value in numbers.items():
                run.fp8.setdefault((layer, operand, name), Series()).add(int(row[STEP]), _finite(value))


def _chart_operands(run: Run) -> None:
    """Put the operands that lost most, or whose scale moved most, among the series that are drawn."""

    def worth(place: tuple[str, str]) -> tuple[float, float]:
        lost, scales = (
            run.fp8[(*place, name)].finite if (*place, name) in run.fp8 else [] for name in ("flushed", "scale")
        )
        positive = [scale for scale in scales if scale > 0]
        return max(lost, default=0.0), math.log(max(positive) / min(positive)) if positive else 0.0

    places = sorted(dict.fromkeys((layer, operand) for layer, operand, _ in run.fp8), key=worth, reverse=True)
    for layer, operand in places[:_OPERANDS_DRAWN]:
        for name, family in (("flushed", FP8_FLUSHED), ("amax", FP8_AMAX), ("scale", FP8_SCALE)):
            if (layer, operand, name) in run.fp8:
                run.series[f"{family}/{layer} {operand}"] = run.fp8[layer, operand, name]


def _finite(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(value)
