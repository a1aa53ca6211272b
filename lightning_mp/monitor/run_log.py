"""Where what a monitor sees is written: the run's folder, every logger, the console, and memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from lightning_mp.compat.lightning import Trainer, rank_zero_info, rank_zero_warn
from lightning_mp.monitor import metric_names
from lightning_mp.monitor.callback_utils import log
from lightning_mp.monitor.events import Event
from lightning_mp.monitor.findings import Finding
from lightning_mp.monitor.run_files import RunDir, open_folder, write_run
from lightning_mp.monitor.run_folder import FINDINGS, RunFolder

#: how many events of a kind there were, as a metric
EVENT_COUNT = "health/events"


class Book:
    """One writer's part of a run's folder (on rank 0), with what it wrote in ``rows`` and ``events`` on every rank."""

    def __init__(self, writer: str) -> None:
        self._writer = writer
        self._folder: RunFolder | None = None
        self._counts: Counter[str] = Counter()
        self.rows: list[dict[str, Any]] = []
        self.events: list[Event] = []

    def open(self, trainer: Trainer, run_dir: RunDir, *, fresh: bool) -> None:
        """Begin, or go on; every rank has to call it.

        Raises:
            PlanError: someone is writing there already; on every rank.
        """
        self._folder = open_folder(trainer, run_dir, self._writer)
        if fresh:
            self.rows.clear()
            self.events.clear()
            self._counts.clear()
        self._stands(trainer, "running")

    def findings(self, found: Iterable[Finding]) -> None:
        """Write down what the doctor found."""
        if self._folder is not None:
            self._folder.write(FINDINGS, {"findings": [finding.to_dict() for finding in found]})

    def row(self, trainer: Trainer, step: int, values: Mapping[str, float | None], logged: Mapping[str, float]) -> None:
        """Write a reading down; ``logged`` of it goes to the loggers."""
        self.rows.append({metric_names.STEP: step, **values})
        if self._folder is not None:
            self._folder.metrics(step, values)
        log(trainer, logged)

    def event(self, trainer: Trainer, event: Event) -> None:
        """Write an event down, and tell it."""
        self.events.append(event)
        self._counts[event.kind] += 1
        if self._folder is not None:
            self._folder.event(event)
        log(trainer, {f"{EVENT_COUNT}/{event.kind}": float(self._counts[event.kind])})
        if event.is_alert:
            rank_zero_warn(f"{self._writer}: {event}")
        else:
            rank_zero_info(f"{self._writer}: {event}")

    def close(self, trainer: Trainer, *, report: bool, error: BaseException | None = None) -> None:
        """Write down how the run ended, and its report."""
        folder, self._folder = self._folder, None
        if folder is None:
            return
        write_run(folder, trainer, "finished" if error is None else "failed", error)
        folder.close(self._writer)
        if report:
            _write_report(folder)

    def _stands(self, trainer: Trainer, status: str) -> None:
        if self._folder is not None:
            write_run(self._folder, trainer, status)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_folder": None}


def _write_report(folder: RunFolder) -> None:
    try:
        from lightning_mp.monitor.report import write_report

        path = write_report(folder.path)
    except Exception as error:  # a report that cannot be written must not hide how the run ended
        rank_zero_info(f"no report on {folder.path}: {error}")
    else:
        rank_zero_info(f"report: {path}")
