"""The folder of a run: metrics, events, and the machine and versions they come from."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from lightning_mp.errors import Fault, PlanError
from lightning_mp.monitor.events import Event
from lightning_mp.monitor.strict_json import to_json

METRICS = "metrics.jsonl"
EVENTS = "events.jsonl"
FP8 = "fp8.jsonl"
RUN = "run.json"
AUDIT = "audit.json"
FINDINGS = "findings.json"
REPORT = "report.html"
#: a pipeline's schedule as it ran, and its picture
PIPELINE, PIPELINE_PICTURE = "pipeline.json", "pipeline.svg"
_LOCK = ".lightning_mp.lock"

_open: dict[Path, RunFolder] = {}


class RunFolder:
    """One run's folder, shared by its callbacks; one line per reading or event, written to disk at once.

    Made by :meth:`open`. Only one process may write to a folder, and only one callback of each name.
    """

    def __init__(self, path: Path, owner: object, lock: FileLock) -> None:
        self.path = path
        self._owner, self._lock = owner, lock
        self._writers: set[str] = set()

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, writer: str, owner: object, fresh: bool = True) -> RunFolder:
        """The folder, for the callback named ``writer`` of the run ``owner`` (a Trainer).

        The first writer of a run deletes what an earlier run wrote there; with ``fresh=False`` it appends.

        Raises:
            PlanError: another run, or a second ``writer`` of this one, is writing there.
        """
        folder = Path(path).resolve()
        found = _open.get(folder)
        if found is not None and (found._owner is not owner or writer in found._writers):
            raise _taken(writer, f"run_dir={str(path)!r}, where a {writer} writes already")
        if found is None:
            folder.mkdir(parents=True, exist_ok=True)
            lock = FileLock(folder / _LOCK)
            try:
                lock.acquire(timeout=0)
            except Timeout:
                raise _taken(writer, f"run_dir={str(path)!r}, to which another run is writing") from None
            found = _open[folder] = cls(folder, owner, lock)
            if fresh:
                for name in (METRICS, EVENTS, FP8, RUN, AUDIT, FINDINGS, REPORT):
                    (folder / name).unlink(missing_ok=True)
        found._writers.add(writer)
        return found

    def metrics(self, step: int, values: Mapping[str, Any]) -> None:
        """Append a reading."""
        self._append(METRICS, {"step": step, **values})

    def fp8(self, step: int, operands: Mapping[str, Any]) -> None:
        """Append what became of FP8's operands, by layer and role."""
        self._append(FP8, {"step": step, "layers": operands})

    def event(self, event: Event) -> None:
        """Append an event."""
        self._append(EVENTS, event.to_dict())

    def write(self, name: str, values: Mapping[str, Any]) -> None:
        """Write the file ``name``, whole or not at all."""
        beside = self.path / f".{name}.tmp"
        beside.write_text(to_json(values, indent=2) + "\n", encoding="utf-8")
        beside.replace(self.path / name)

    def close(self, writer: str) -> None:
        """``writer`` is done; the last one releases the folder."""
        self._writers.discard(writer)
        if not self._writers and _open.get(self.path) is self:
            del _open[self.path]
            (self.path / _LOCK).unlink(missing_ok=True)
            self._lock.release()

    def _append(self, name: str, values: Mapping[str, Any]) -> None:
        with (self.path / name).open("a", encoding="utf-8") as file:
            file.write(to_json(values) + "\n")


def _taken(writer: str, given: str) -> PlanError:
    fix = "give each run a run_dir of its own, or leave run_dir out"
    return PlanError([Fault(given, "one run per folder, with one callback of each kind", fix)], writer)
