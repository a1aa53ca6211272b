"""What a monitor writes: the run's folder (rank 0), every logger, the console, and rows and events in memory."""

from __future__ import annotations

import logging
import os
import platform
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from lightning_mp.compat.lightning import Trainer, rank_zero_info
from lightning_mp.engines.plan_base import PlanBase
from lightning_mp.errors import PlanError
from lightning_mp.monitor import metric_names
from lightning_mp.monitor.alerts.reading import Operand
from lightning_mp.monitor.callback_utils import log
from lightning_mp.monitor.events import Event
from lightning_mp.monitor.findings import Finding
from lightning_mp.monitor.run_folder import FINDINGS, RUN, RunFolder
from lightning_mp.numerics.device import describe

#: for alerts: as a Python warning each would begin with a file and a line of this package
_LOGGER = logging.getLogger("lightning_mp")
RunDir = str | os.PathLike[str] | None
#: the folder under the root folder where no logger has one
FALLBACK = "lightning_mp_run"
_PACKAGES = ("lightning-mp", "torch", "lightning", "transformers", "peft", "deepspeed", "torchao")
#: a layer has nine numbers, and a model hundreds of layers
_ALL_FP8, _THEN_EVERY = 200, 20
#: how many events of a kind there were, as a metric
EVENT_COUNT = "health/events"


def is_fresh(trainer: Trainer) -> bool:
    """Whether a run begins, rather than resumes from a checkpoint or follows an earlier fit."""
    return trainer.ckpt_path is None and trainer.global_step == 0


def open_folder(trainer: Trainer, run_dir: RunDir, writer: str) -> RunFolder | None:
    """The folder of this run on rank 0, ``None`` on any other; every rank has to call it.

    ``run_dir=None`` is the logger's folder, or ``lightning_mp_run`` under ``default_root_dir`` without one. What an
    earlier run wrote there is deleted, unless this one resumes from a checkpoint or follows an earlier fit.

    Raises:
        PlanError: another run or callback writes there already; on every rank.
    """
    # every rank asks: the logger's folder is rank 0's, which tells the others; without a logger it is the root folder
    logged = trainer.log_dir if trainer.loggers else None
    path = run_dir or logged or Path(trainer.default_root_dir) / FALLBACK
    folder: RunFolder | None = None
    refused: PlanError | None = None
    if trainer.is_global_zero:
        try:
            folder = RunFolder.open(path, writer=writer, owner=trainer, fresh=is_fresh(trainer))
        except PlanError as error:
            refused = error
    refused = trainer.strategy.broadcast(refused)
    if refused is not None:
        raise refused
    return folder


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
        "trainer": {
            "max_steps": trainer.max_steps,
            "max_epochs": trainer.max_epochs,
            "accumulate_grad_batches": trainer.accumulate_grad_batches,
            "gradient_clip_val": trainer.gradient_clip_val,
        },
    }
    if isinstance(plugin, PlanBase) and plugin.fp8_layers:
        values["fp8_layers"] = [asdict(layer) for layer in plugin.fp8_layers]
    folder.write(RUN, values)


def machine(device: torch.device) -> dict[str, Any]:
    """What a run ran on."""
    known = describe(device)
    return {
        "device": known.name,
        "type": known.type,
        "memory_bytes": known.memory,
        "cpus": os.cpu_count(),
        "system": platform.platform(),
    }


def versions() -> dict[str, str]:
    """Of Python, and of the packages that numbers may depend on."""
    found = {package: found for package in _PACKAGES if (found := _version(package)) is not None}
    return {"python": sys.version.split()[0], **found}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


class RunLog:
    """What one callback writes to the run's folder (on rank 0), and has in ``rows`` and ``events`` on every rank."""

    def __init__(self, writer: str) -> None:
        self._writer = writer
        self._folder: RunFolder | None = None
        self._counts: Counter[str] = Counter()
        self.rows: list[dict[str, Any]] = []
        self.events: list[Event] = []
        #: FP8's operands, as written
        self.fp8_rows: list[dict[str, Any]] = []
        self._fp8_readings = 0

    def open(self, trainer: Trainer, run_dir: RunDir, *, fresh: bool) -> None:
        """Begin, or continue; every rank has to call it.

        Raises:
            PlanError: another run or callback writes there already; on every rank.
        """
        self._folder = open_folder(trainer, run_dir, self._writer)
        if fresh:
            self.rows.clear()
            self.events.clear()
            self.fp8_rows.clear()
            self._counts.clear()
        if self._folder is not None:
            write_run(self._folder, trainer, "running")

    def findings(self, found: Iterable[Finding]) -> None:
        """Write what the doctor found."""
        if self._folder is not None:
            self._folder.write(FINDINGS, {"findings": [finding.to_dict() for finding in found]})

    def row(self, trainer: Trainer, step: int, values: Mapping[str, float | None], logged: Mapping[str, float]) -> None:
        """Write a reading; ``logged`` of it goes to the loggers."""
        self.rows.append({metric_names.STEP: step, **values})
        if self._folder is not None:
            self._folder.metrics(step, values)
        log(trainer, logged)

    def fp8(self, step: int, operands: Mapping[tuple[str, str], Operand]) -> None:
        """Write what became of FP8's operands in a reading: of each at first, later of one in twenty."""
        self._fp8_readings += 1
        if self._fp8_readings > _ALL_FP8 and self._fp8_readings % _THEN_EVERY:
            return
        layers: dict[str, dict[str, dict[str, float]]] = {}
        for (layer, role), one in operands.items():
            numbers = {"flushed": one.flushed, "amax": one.amax, "scale": one.scale}
            layers.setdefault(layer, {})[role] = numbers
        self.fp8_rows.append({metric_names.STEP: step, "layers": layers})
        if self._folder is not None:
            self._folder.fp8(step, layers)

    def event(self, trainer: Trainer, event: Event) -> None:
        """Write an event, and print it."""
        self.events.append(event)
        self._counts[event.kind] += 1
        if self._folder is not None:
            self._folder.event(event)
        log(trainer, {f"{EVENT_COUNT}/{event.kind}": float(self._counts[event.kind])})
        if event.is_alert and trainer.is_global_zero:
            _LOGGER.warning("%s: %s", self._writer, event)
        else:
            rank_zero_info(f"{self._writer}: {event}")

    def close(self, trainer: Trainer, *, report: bool, error: BaseException | None = None) -> None:
        """Write how the run ended, and its report."""
        folder, self._folder = self._folder, None
        if folder is None:
            return
        write_run(folder, trainer, "finished" if error is None else "failed", error)
        folder.close(self._writer)
        if report:
            _write_report(folder)

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
