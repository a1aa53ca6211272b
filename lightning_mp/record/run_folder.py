"""The folder of a run, to which its callbacks write readings, events and other files."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from lightning_mp.errors import PlanError
from lightning_mp.record import metric_names
from lightning_mp.record.events import Event
from lightning_mp.record.file_format import UPDATE, is_step, json_object, newer, stamped

METRICS = "metrics.jsonl"
EVENTS = "events.jsonl"
RUN = "run.json"
AUDIT, AUDIT_TABLE = "audit.json", "audit.md"
REPORT = "report.html"
#: the schedule that a pipeline ran
PIPELINE = "pipeline.json"
#: the folder of saved batches, and their names in it
BATCHES, BATCH_FILES = "nonfinite", "step_*_rank*.pt"
#: files that a run writes; an earlier run's are replaced only if its run.json names this package
_FILES = (METRICS, EVENTS, AUDIT, AUDIT_TABLE, REPORT, PIPELINE, RUN)
_WRITTEN_BY = {"written_by": "lightning_mp"}
_LOCK = ".lightning_mp.lock"
_OWN = "pass run_dir= to give this run a folder of its own"
_LOGGER = logging.getLogger("lightning_mp")

_open: dict[Path, RunFolder] = {}


class InUseError(PlanError):
    """The folder is in use by another run, or holds files that a run may not overwrite."""


class RunFolder:
    """One run's folder, shared by its callbacks. The file is closed after each line.

    Only one process writes to a folder, and only one callback of each name. If a file cannot be
    written, as on a full disk, a warning is logged once and training continues.
    """

    def __init__(self, path: Path, owner: object) -> None:
        self.path = path
        #: True once run.json says that the run failed
        self.failed = False
        self._owner, self._lock = owner, FileLock(path / _LOCK)
        self._writers: set[str] = set()
        self._warned = False

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        *,
        writer: str,
        owner: object,
        resumed_at: int | None = None,
        new: bool = False,
    ) -> RunFolder:
        """Create and lock the folder ``path`` for the callback named ``writer``, and return it.

        ``owner`` is the run's Trainer. Later writers of the same Trainer share the folder.
        The first writer of a fresh run deletes the files of an earlier run. With ``resumed_at``,
        the step at which the run resumes, it keeps them and drops readings of steps that run again.

        Raises:
            InUseError: another run is writing there. Or the folder holds files that this package
                did not write, files of a newer format version, or with ``new`` any run's files.
            PlanError: this run has a ``writer`` of the same name there.
            OSError: the folder cannot be created or locked.
        """
        path = Path(path).resolve()
        folder = _open.get(path)
        if folder is None or folder._owner is not owner:
            path.mkdir(parents=True, exist_ok=True)
            folder = cls(path, owner)
            try:
                folder._lock.acquire(timeout=0)
            except Timeout:
                raise InUseError.of(f"Another run is writing to {path}", _OWN, writer) from None
            try:
                folder._begin(writer, resumed_at, new)
            except (OSError, PlanError):
                folder._release()
                raise
            _open[path] = folder
        if writer in folder._writers:
            fix = "remove one, or give each a run_dir= of its own"
            raise PlanError.of(f"Two {writer} callbacks write to {path}", fix, writer)
        folder._writers.add(writer)
        return folder

    def _begin(self, writer: str, resumed_at: int | None, new: bool) -> None:
        """Delete or shorten the files of an earlier run, and write ``run.json`` if it is missing.

        Raises:
            InUseError: the folder holds files that must stay.
            OSError: a file cannot be deleted or written.
        """
        about = _about(self.path)
        ours = _is_ours(about)
        if ours and (said := newer(about)):
            raise InUseError.of(f"{self.path / RUN} {said}", f"{UPDATE}, or {_OWN}", writer)
        there = next((name for name in _FILES if (self.path / name).exists()), None)
        if there is not None and (new or not ours):
            what = f"{self.path} holds {there}, which this package did not write and would overwrite"
            raise InUseError.of(what, _OWN, writer)
        if resumed_at is not None:
            self._drop_from(resumed_at)
        elif ours:
            for path in (*(self.path / BATCHES).glob(BATCH_FILES), *(self.path / name for name in _FILES)):
                path.unlink(missing_ok=True)
        if not (self.path / RUN).exists():
            atomic_write(self.path / RUN, to_json(stamped({**_WRITTEN_BY, "status": "running"})) + "\n")

    def _drop_from(self, step: int) -> None:
        """Rewrite readings and events without unreadable lines, and without readings that are made again.

        The last line is unreadable if the earlier run was killed while it wrote.
        """
        for path in (path for path in (self.path / METRICS, self.path / EVENTS) if path.is_file()):
            kept: list[bytes] = []
            for line in path.read_bytes().splitlines():
                row = json_object(line) or {}
                readable = is_step(row.get(metric_names.STEP))
                if readable and (path.name == EVENTS or not made_again(row, step)):
                    kept.append(line + b"\n")
            atomic_write_bytes(path, b"".join(kept))

    def metrics(self, step: int, values: Mapping[str, Any]) -> None:
        """Append the readings of one step to ``metrics.jsonl``."""
        self._append(METRICS, {metric_names.STEP: step, **values})

    def event(self, event: Event) -> None:
        """Append an event to ``events.jsonl``."""
        self._append(EVENTS, event.to_dict())

    def write(self, name: str, values: Mapping[str, Any]) -> None:
        """Write the file ``name`` as JSON, whole or not at all. Log a warning if it cannot be written."""
        by = _WRITTEN_BY if name == RUN else {}
        self.text(name, to_json(stamped({**by, **values}), indent=2) + "\n")

    def text(self, name: str, text: str) -> None:
        """Write the file ``name``, whole or not at all. Log a warning if it cannot be written."""
        with self._warns_once():
            atomic_write(self.path / name, text)

    def close(self, writer: str) -> None:
        """End the use by ``writer``. The last writer releases the folder's lock."""
        self._writers.discard(writer)
        if not self._writers and _open.get(self.path) is self:
            del _open[self.path]
            self._release()

    def _release(self) -> None:
        with suppress(OSError):
            (self.path / _LOCK).unlink(missing_ok=True)
        self._lock.release()

    @contextmanager
    def _warns_once(self) -> Generator[None, None, None]:
        try:
            yield
        except OSError as error:
            if not self._warned:
                self._warned = True
                _LOGGER.warning("%s cannot be written (%s); training goes on, with gaps in the files", self.path, error)

    def _append(self, name: str, values: Mapping[str, Any]) -> None:
        with self._warns_once(), (self.path / name).open("a", encoding="utf-8") as file:
            file.write(to_json(values) + "\n")


def atomic_write(target: Path, text: str) -> None:
    """Write a text file, whole or not at all.

    Raises:
        OSError: the file cannot be written.
    """
    # text read from a file may hold half a surrogate pair, which becomes a question mark
    atomic_write_bytes(target, text.encode("utf-8", errors="replace"))


def atomic_write_bytes(target: Path, content: bytes) -> None:
    """Write a file, whole or not at all.

    Raises:
        OSError: the file cannot be written.
    """
    part = target.with_name(f".{target.name}.tmp")
    try:
        part.write_bytes(content)
        part.replace(target)
    except OSError as error:
        with suppress(OSError):
            part.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(target)) from error


def made_again(row: Mapping[str, Any], resumed_at: int) -> bool:
    """True if a run that resumes at the step ``resumed_at`` makes the reading ``row`` again.

    A reading without a training loss is one of validation. At ``resumed_at`` itself it was made
    before the checkpoint, so it is not made again.
    """
    validates = metric_names.LOSS not in row
    return row[metric_names.STEP] >= resumed_at + validates


def is_ours(folder: Path) -> bool:
    """True if ``run.json`` says that a run under this package wrote it."""
    return _is_ours(_about(folder))


def _about(folder: Path) -> dict[str, Any]:
    """Return the content of ``run.json``; an empty dict if the file is missing or unreadable."""
    try:
        return json_object((folder / RUN).read_bytes()) or {}
    except OSError:
        return {}


def _is_ours(about: Mapping[str, Any]) -> bool:
    return all(about.get(key) == value for key, value in _WRITTEN_BY.items())


def to_json(values: Mapping[str, Any], indent: int | None = None) -> str:
    """Return ``values`` as standard JSON. A float that is not finite becomes null."""
    try:
        return json.dumps(values, indent=indent, allow_nan=False)
    except ValueError:
        return json.dumps(_finite(values), indent=indent, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}  # pyright: ignore[reportUnknownVariableType]
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]  # pyright: ignore[reportUnknownVariableType]
    return None if isinstance(value, float) and not math.isfinite(value) else value
