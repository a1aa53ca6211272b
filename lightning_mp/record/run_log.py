"""Shared by monitoring callbacks: track optimizer steps, write readings and events, end a run.

Readings and events go to the run's folder (rank 0), every logger, the console, and memory.
"""

import itertools
import logging
import os
import platform
import re
import sys
from collections import Counter, deque
from collections.abc import Mapping, MutableMapping
from contextlib import suppress
from dataclasses import replace
from datetime import datetime, timezone
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from itertools import chain
from pathlib import Path
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch

from lightning_mp.compat import require_versions
from lightning_mp.compat.lightning import (
    Callback,
    LightningModule,
    Trainer,
    accumulates,
    logged_step,
    rank_zero_info,
)
from lightning_mp.errors import PlanError
from lightning_mp.numerics.dtypes import describe
from lightning_mp.plan.run import PlanBase
from lightning_mp.record import metric_names
from lightning_mp.record.events import Event
from lightning_mp.record.run_folder import RUN, InUseError, RunFolder, is_ours, made_again

#: for alerts: a Python warning would begin with a file and a line of this package
_LOGGER = logging.getLogger("lightning_mp")
RunDir = str | os.PathLike[str] | None
#: the name of a run's own folder, and the key of its path in a checkpoint
FALLBACK = "lightning_mp_run"
#: the folders of Trainers without a run_dir, or of the runs that they resume from
_paths: MutableMapping[Trainer, str] = WeakKeyDictionary()
PACKAGES = ("lightning-mp", "torch", "lightning", "transformers", "peft", "deepspeed", "torchao", "hydra-core")
#: the number of readings, and of events, that are kept in memory
IN_MEMORY = 1000
#: the metric that counts the events of a kind
EVENT_COUNT = "health/events"


def is_fresh(trainer: Trainer) -> bool:
    """True if a run neither resumes from a checkpoint nor follows an earlier fit."""
    return trainer.ckpt_path is None and trainer.global_step == 0


def _opened(trainer: Trainer, run_dir: RunDir, writer: str) -> RunFolder:
    """Open and return the run's folder.

    It is ``run_dir`` if that is given. Without it, a resumed run continues in the folder of the
    earlier run. If no such folder is known, or if it is in use, a new folder is made.

    Raises:
        PlanError: ``run_dir`` is not local or in use, or the folder has a ``writer`` of that name.
        OSError: the folder cannot be created or locked.
    """
    resumed_at = None if is_fresh(trainer) else trainer.global_step
    open_ = partial(RunFolder.open, writer=writer, owner=trainer)
    if run_dir is not None:
        if _is_remote(run_dir):
            what = f"run_dir={os.fspath(run_dir)!r} is not a local folder, where the files of a run are written"
            raise PlanError.of(what, "pass a local folder, and copy it after the run", writer)
        return open_(run_dir, resumed_at=resumed_at)
    logged, home = _homes(trainer)
    earlier = [] if resumed_at is None else [logged, _paths.get(trainer)]
    for path in earlier:
        if path is not None and is_ours(Path(path)):
            with suppress(InUseError):  # the resumed run then gets another folder
                return open_(path, resumed_at=resumed_at)
    numbered = (home / f"{FALLBACK}_{number}" for number in itertools.count(2))
    for path in chain([] if logged is None else [logged], [home / FALLBACK], numbered):
        with suppress(InUseError):
            return open_(path, new=True)
    raise AssertionError("there are always more candidates")


def _homes(trainer: Trainer) -> tuple[Path | None, Path]:
    """Return the folder that the first logger made for this run alone, or ``None``, and a parent folder.

    A fallback folder is made below the parent. A remote folder is replaced by a local one.
    """
    root = _local(trainer.default_root_dir)
    logger: Any = trainer.loggers[0] if trainer.loggers else None
    own, save_dir = (_local(getattr(logger, name, None)) for name in ("log_dir", "save_dir"))
    folder = own or save_dir or root
    if _is_remote(folder):
        here = "." if _is_remote(root) else root
        rank_zero_info(f"{folder} is not a local folder: the files of this run are written below {here!r}")
        return None, Path(here)
    if save_dir is None:
        return None, Path(root)
    if own is not None:  # a version folder
        return (None if Path(own).resolve() == Path(save_dir).resolve() else Path(own)), Path(own)
    return None, Path(save_dir, *(str(part) for part in (logger.name, logger.version) if part not in (None, "")))


def _local(path: Any) -> Any:
    """Return a path without ``file://``, or ``file:/``, to which Lightning shortens it; else the value itself."""
    return re.sub("^file:/+", "/", os.fspath(path)) if isinstance(path, (str, os.PathLike)) else path


def _is_remote(path: str | os.PathLike[str]) -> bool:
    return "://" in os.fspath(path)


class RunCallback(Callback):
    """A callback that releases a run's resources when the run ends or fails.

    A pickled copy has ``None`` in place of them.
    """

    #: the attributes that are ``None`` in a copy (a spawned process, a sweep)
    _of_run: tuple[str, ...] = ()

    def _release(self, trainer: Trainer, error: BaseException | None = None) -> None:
        """Release the run's resources. The run has ended, or failed with ``error``. May be called again."""

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._release(trainer)

    # after an exception Lightning does not call a callback's ``teardown``
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._release(trainer, exception)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, **dict.fromkeys(self._of_run)}


class StepTracker:
    """A tracker of the batches in which an optimizer steps, by automatic or manual optimization.

    A callback calls the methods from its hooks. ``step`` is ``global_step`` as ``training_step``
    sees it: the number of optimizer steps tried before, skipped ones included.
    """

    def __init__(self) -> None:
        require_versions("callbacks", "lightning")
        #: the step number of the current batch
        self.step = 0
        self._pending = self._tried = False

    def batch_starts(self, trainer: Trainer) -> None:
        """Note the step number. Call in ``on_train_batch_start``."""
        self.step = trainer.global_step

    def backward(self) -> None:
        """Note a backward. Call in ``on_before_backward``.

        If no backward ran since the last step, ``training_step`` returned None.
        """
        self._pending = True

    def begins(self, trainer: Trainer) -> bool:
        """Return True if an optimizer is about to step. Call in ``on_before_optimizer_step``.

        Return False within an accumulation window that the strategy handles, without a backward
        since the last step, and outside training.
        """
        within_window = trainer.strategy.handles_gradient_accumulation and accumulates(trainer)
        if within_window or not (self._pending and trainer.training):
            return False
        if trainer.lightning_module.automatic_optimization:
            self._pending = False
        self._tried = True
        return True

    def batch_ends(self) -> bool:
        """Return True if an optimizer step began in the batch. Call in ``on_train_batch_end``."""
        tried, self._tried = self._tried, False
        if tried:
            self._pending = False
        return tried


def write_run(folder: RunFolder, trainer: Trainer, status: str, error: BaseException | None = None) -> None:
    """Write ``run.json``: the status of the run, its machine, versions, strategy and plan.

    ``status`` is ``"running"``, ``"finished"`` or ``"failed"``.
    """
    plugin = trainer.precision_plugin
    values: dict[str, Any] = {
        "status": status,
        "error": None if error is None else f"{type(error).__name__}: {error}",
        "at": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": {**machine(trainer.strategy.root_device), "processes": trainer.world_size},
        "versions": versions(),
        "strategy": type(trainer.strategy).__name__,
        "precision": str(trainer.precision),
        "plan": plugin.policy.to_dict() if isinstance(plugin, PlanBase) else None,
    }
    folder.write(RUN, values)


def machine(device: torch.device) -> dict[str, Any]:
    """Return plain values about the device, the CPUs and the operating system."""
    known = describe(device)
    on = {"device": known.name, "type": known.type, "memory_bytes": known.memory}
    return {**on, "cpus": os.cpu_count(), "system": platform.platform()}


def versions() -> dict[str, str]:
    """Return the versions of Python, and of installed packages that a run's numbers may depend on."""
    installed = {"python": sys.version.split()[0]}
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            installed[package] = version(package)
    return installed


def callbacks_of(trainer: Trainer) -> list[Callback]:
    """Return the callbacks of a Trainer, which Lightning's types do not declare."""
    return cast("Any", trainer).callbacks


def log(trainer: Trainer, values: Mapping[str, float], step: int) -> None:
    """Send ``values`` to every logger, on rank 0 only.

    ``step`` is :func:`logged_step` at the time of the measurement.
    """
    if values and trainer.is_global_zero:
        for logger in trainer.loggers:
            logger.log_metrics(dict(values), step=step)


def show_alert(writer: str, event: Event) -> None:
    """Show an alert as a yellow or red panel on stderr.

    If stderr is no terminal, or logging is configured, log one warning line instead.
    """
    if not sys.stderr.isatty() or _LOGGER.hasHandlers():
        _LOGGER.warning("%s: %s", writer, event)
        return
    from rich.console import Console
    from rich.panel import Panel
    from rich.text import Text

    lines = {"what": str(replace(event, cause="", advice="")), "why": event.cause, "do": event.advice}
    text = Text("\n").join(Text.assemble((f"{name:5}", "bold"), said) for name, said in lines.items() if said)
    colour, title = "red" if event.severity == "error" else "yellow", f"{writer}: {event.severity}"
    Console(stderr=True).print(Panel(text, title=title, border_style=colour, title_align="left"))


class RunLog:
    """The readings and events of one callback: in the run's folder (rank 0), the last 1,000 in memory (every rank)."""

    def __init__(self, writer: str) -> None:
        self.writer = writer
        #: set on rank 0 between ``open`` and ``close``
        self.folder: RunFolder | None = None
        self._counts: Counter[str] = Counter()
        #: files hold all readings and events; memory holds the last ones and so does not grow
        self.rows: deque[dict[str, Any]] = deque(maxlen=IN_MEMORY)
        self.events: deque[Event] = deque(maxlen=IN_MEMORY)

    def open(self, trainer: Trainer, run_dir: RunDir) -> None:
        """Open the run's folder on rank 0, and write ``run.json``. A collective: every rank must call it.

        With ``run_dir=None`` the run gets a folder of its own. For a CSVLogger or TensorBoardLogger
        it is the version folder. For another first logger it is ``lightning_mp_run`` in its
        ``<save_dir>/<name>/<version>``, and without a logger in ``default_root_dir``. If an earlier
        run is there, it is ``lightning_mp_run_2`` and so on.

        A fresh run replaces the files of an earlier run in a given ``run_dir``. A run that resumes
        from a checkpoint, or follows an earlier fit, appends. Readings that it makes again are
        dropped, in memory too.

        Raises:
            PlanError: another run or callback writes there already, a file is in the way, or the
                folder cannot be opened. Every rank raises it.
        """
        refused: PlanError | None = None
        if trainer.is_global_zero:
            try:
                self.folder = _opened(trainer, run_dir, self.writer)
            except PlanError as error:
                refused = error
            # raised after the broadcast, because the other ranks wait in it
            except (OSError, ValueError, RuntimeError) as error:
                what = f"The run's folder cannot be opened: {type(error).__name__}: {error}"
                refused = PlanError.of(what, "pass run_dir= a folder that can be written", self.writer)
        refused, path = trainer.strategy.broadcast((refused, None if self.folder is None else str(self.folder.path)))
        if refused is not None:
            raise refused
        if run_dir is None and path is not None:
            if trainer not in _paths:
                rank_zero_info(f"readings, events and the report of this run: {path}")
            _paths[trainer] = path
        if self.folder is not None:
            write_run(self.folder, trainer, "running")
        if is_fresh(trainer):
            self.rows.clear()
            self.events.clear()
            self._counts.clear()
        while self.rows and made_again(self.rows[-1], trainer.global_step):
            self.rows.pop()

    def row(self, step: int, values: Mapping[str, float | None]) -> None:
        """Keep the readings of one step in memory, and write them on rank 0."""
        self.rows.append({metric_names.STEP: step, **values})
        if self.folder is not None:
            self.folder.metrics(step, values)

    def event(self, trainer: Trainer, event: Event) -> None:
        """Keep an event in memory. On rank 0 write it, print it, and send its kind's count to the loggers."""
        self.events.append(event)
        self._counts[event.kind] += 1
        if self.folder is not None:
            self.folder.event(event)
        log(trainer, {f"{EVENT_COUNT}/{event.kind}": float(self._counts[event.kind])}, logged_step(trainer))
        if event.is_alert and trainer.is_global_zero:
            show_alert(self.writer, event)
        else:
            rank_zero_info(f"{self.writer}: {event}")

    def close(self, trainer: Trainer, error: BaseException | None = None, *, report: bool = False) -> None:
        """Write the run's status on rank 0, release the folder, and with ``report`` write ``report.html``.

        An interrupted run is not marked as finished, and a failed one stays ``"failed"``. A
        report that cannot be written is reported, not raised. Later calls do nothing.
        """
        folder, self.folder = self.folder, None
        if folder is None:
            return
        if error is not None or not (folder.failed or trainer.interrupted):
            write_run(folder, trainer, "finished" if error is None else "failed", error)
        folder.failed = folder.failed or error is not None
        folder.close(self.writer)
        if report:
            try:
                from lightning_mp.record.report import write_report

                rank_zero_info(f"report: {write_report(folder.path)}")
            except Exception as failure:  # a failed report must not hide the run's own error
                rank_zero_info(f"no report on {folder.path}: {failure}")

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "folder": None}


class WritesRun(RunCallback):
    """A callback that writes to the run's folder.

    A checkpoint holds the folder's path, so that a resumed run continues there. A ``run_dir`` that
    the user passes is not saved, and a callback with one reads no path from a checkpoint.
    """

    run_dir: RunDir = None
    #: True if the callback writes an event for every non-finite step
    writes_every_event = False
    _log: RunLog

    @property
    def events(self) -> list[Event]:
        """The last 1,000 events; ``events.jsonl`` has all."""
        return list(self._log.events)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if trainer in _paths:
            checkpoint[FALLBACK] = _paths[trainer]

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if isinstance(checkpoint.get(FALLBACK), str) and self.run_dir is None:
            _paths[trainer] = checkpoint[FALLBACK]
