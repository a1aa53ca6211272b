"""What monitoring callbacks share: the steps they look at, a run's end, and what they write.

That is the run's folder (rank 0), every logger, the console, and rows and events in memory.
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

#: for alerts: as a Python warning each would begin with a file and a line of this package
_LOGGER = logging.getLogger("lightning_mp")
RunDir = str | os.PathLike[str] | None
#: the name of a run's own folder, and the key under which a checkpoint names it
FALLBACK = "lightning_mp_run"
#: the folders of Trainers to which no run_dir was given, or of the runs that they resume from
_paths: MutableMapping[Trainer, str] = WeakKeyDictionary()
PACKAGES = ("lightning-mp", "torch", "lightning", "transformers", "peft", "deepspeed", "torchao", "hydra-core")
#: the readings and the events that are kept in memory
IN_MEMORY = 1000
#: how many events of a kind there were, as a metric
EVENT_COUNT = "health/events"


def is_fresh(trainer: Trainer) -> bool:
    """Whether a run begins, rather than resumes from a checkpoint or follows an earlier fit."""
    return trainer.ckpt_path is None and trainer.global_step == 0


def _opened(trainer: Trainer, run_dir: RunDir, writer: str) -> RunFolder:
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
            with suppress(InUseError):  # the run that resumes gets another
                return open_(path, resumed_at=resumed_at)
    numbered = (home / f"{FALLBACK}_{number}" for number in itertools.count(2))
    for path in chain([] if logged is None else [logged], [home / FALLBACK], numbered):
        with suppress(InUseError):
            return open_(path, new=True)
    raise AssertionError("there are always more candidates")


def _homes(trainer: Trainer) -> tuple[Path | None, Path]:
    """The folder that a logger made for this run alone, if it did; and where else to make one."""
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
    """Without ``file://``, of which Lightning leaves ``file:/`` in ``default_root_dir``."""
    return re.sub("^file:/+", "/", os.fspath(path)) if isinstance(path, (str, os.PathLike)) else path


def _is_remote(path: str | os.PathLike[str]) -> bool:
    return "://" in os.fspath(path)


class RunCallback(Callback):
    """A callback that gives up what belongs to a run when it is over or has failed; a copy has nothing of it."""

    #: the attributes that a copy (a spawned process, a sweep) does not take along
    _of_run: tuple[str, ...] = ()

    def _release(self, trainer: Trainer, error: BaseException | None = None) -> None:
        """Give up what belongs to the run, which has ended or failed; may be called again."""

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._release(trainer)

    # Lightning calls no ``teardown`` of a callback then
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._release(trainer, exception)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, **dict.fromkeys(self._of_run)}


class StepTracker:
    """Finds out from a callback's hooks in which training batches an optimizer steps, however it is stepped.

    A step is known by ``global_step`` as ``training_step`` sees it: the number of steps tried before it.
    """

    def __init__(self) -> None:
        require_versions("callbacks", "lightning")
        #: of the batch at hand
        self.step = 0
        self._pending = self._tried = False

    def batch_starts(self, trainer: Trainer) -> None:
        """For ``on_train_batch_start``."""
        self.step = trainer.global_step

    def backward(self) -> None:
        """For ``on_before_backward``: without one since the last step, ``training_step`` returned None."""
        self._pending = True

    def begins(self, trainer: Trainer) -> bool:
        """For ``on_before_optimizer_step``: whether an optimizer is really about to step, in training."""
        within_window = trainer.strategy.handles_gradient_accumulation and accumulates(trainer)
        if within_window or not (self._pending and trainer.training):
            return False
        if trainer.lightning_module.automatic_optimization:
            self._pending = False
        self._tried = True
        return True

    def batch_ends(self) -> bool:
        """For ``on_train_batch_end``: whether an optimizer stepped in the batch."""
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
    """What a run ran on."""
    known = describe(device)
    on = {"device": known.name, "type": known.type, "memory_bytes": known.memory}
    return {**on, "cpus": os.cpu_count(), "system": platform.platform()}


def versions() -> dict[str, str]:
    """Of Python, and of the packages that numbers may depend on."""
    installed = {"python": sys.version.split()[0]}
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            installed[package] = version(package)
    return installed


def callbacks_of(trainer: Trainer) -> list[Callback]:
    """The callbacks of a run."""
    return cast("Any", trainer).callbacks


def log(trainer: Trainer, values: Mapping[str, float], step: int) -> None:
    """Send ``values`` to every logger; ``step`` is :func:`logged_step` as it was when they were measured."""
    if values and trainer.is_global_zero:
        for logger in trainer.loggers:
            logger.log_metrics(dict(values), step=step)


def show_alert(writer: str, event: Event) -> None:
    """On a terminal a panel, yellow or red: what, why, what to do; elsewhere, or where logging is set up, one line."""
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
    """What one callback writes to the run's folder (on rank 0); the last 1,000 are in memory on every rank."""

    def __init__(self, writer: str) -> None:
        self.writer = writer
        #: between ``open`` and ``close``
        self.folder: RunFolder | None = None
        self._counts: Counter[str] = Counter()
        #: the last of what was written: files hold all of it, memory does not grow with the run
        self.rows: deque[dict[str, Any]] = deque(maxlen=IN_MEMORY)
        self.events: deque[Event] = deque(maxlen=IN_MEMORY)

    def open(self, trainer: Trainer, run_dir: RunDir) -> None:
        """Begin, or continue; every rank has to call it, once training starts.

        With ``run_dir=None`` it is a folder of the run's own: the version folder of a CSVLogger or TensorBoardLogger,
        else ``lightning_mp_run`` in ``<save_dir>/<name>/<version>`` of the first logger, without one in
        ``default_root_dir``; if an earlier run is there, ``lightning_mp_run_2`` and so on. Files of an earlier run in a
        given ``run_dir`` are replaced. A run that resumes from a checkpoint, or follows an earlier fit, appends.

        Raises:
            PlanError: another run or callback writes there already, a file is in the way, or the folder cannot be
                opened; on every rank.
        """
        refused: PlanError | None = None
        if trainer.is_global_zero:
            try:
                self.folder = _opened(trainer, run_dir, self.writer)
            except PlanError as error:
                refused = error
            except (OSError, ValueError, RuntimeError) as error:  # the others wait for this rank, whatever it meets
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
        """Write a reading."""
        self.rows.append({metric_names.STEP: step, **values})
        if self.folder is not None:
            self.folder.metrics(step, values)

    def event(self, trainer: Trainer, event: Event) -> None:
        """Write an event, and print it."""
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
        """Write how the run ended, and its report."""
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
            except Exception as failure:  # a report that cannot be written must not hide how the run ended
                rank_zero_info(f"no report on {folder.path}: {failure}")

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "folder": None}


class WritesRun(RunCallback):
    """A callback that writes to the run's folder: a checkpoint names it, so that a run that resumes goes on there.

    With a ``run_dir`` of the user's nothing is noted, nor looked up: the next run gets its own again, or is given one.
    """

    run_dir: RunDir = None
    #: whether every non-finite step has an event of it
    writes_every_event = False
    _log: RunLog

    @property
    def events(self) -> list[Event]:
        """The last 1,000 events, as written; ``events.jsonl`` has all."""
        return list(self._log.events)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if trainer in _paths:
            checkpoint[FALLBACK] = _paths[trainer]

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if isinstance(checkpoint.get(FALLBACK), str) and self.run_dir is None:
            _paths[trainer] = checkpoint[FALLBACK]
