"""Where a monitor writes: the run's folder, opened once for all callbacks of a run, on rank 0."""

from __future__ import annotations

import os
import platform
import sys
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from lightning_mp.compat.lightning import Trainer
from lightning_mp.engines.plan_base import PlanBase
from lightning_mp.errors import PlanError
from lightning_mp.monitor.run_folder import RUN, RunFolder
from lightning_mp.numerics.device import describe

RunDir = str | os.PathLike[str] | None
#: the folder under the root folder where no logger has one
FALLBACK = "lightning_mp_run"
_PACKAGES = ("lightning-mp", "torch", "lightning", "transformers", "peft", "deepspeed")


def is_fresh(trainer: Trainer) -> bool:
    """Whether a run begins, rather than goes on from a checkpoint or from a fit before."""
    return trainer.ckpt_path is None and trainer.global_step == 0


def open_folder(trainer: Trainer, run_dir: RunDir, writer: str) -> RunFolder | None:
    """The folder of this run on rank 0, ``None`` on any other; every rank has to call it.

    ``run_dir=None`` is the logger's folder, or ``lightning_mp_run`` under ``default_root_dir`` without one. What an
    earlier run wrote there is cleared, unless this one goes on from a checkpoint or from a fit before.

    Raises:
        PlanError: someone is writing there already; on every rank.
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
    """Write ``run.json``: how the run stands, and the machine, the versions, the strategy and the plan it has.

    ``status`` is ``"running"``, ``"finished"`` or ``"failed"``.
    """
    plugin = trainer.precision_plugin
    device = describe(trainer.strategy.root_device)
    values: dict[str, Any] = {
        "status": status,
        "error": None if error is None else f"{type(error).__name__}: {error}",
        "at": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": {
            "device": device.name,
            "type": device.type,
            "memory_bytes": device.memory,
            "processes": trainer.world_size,
            "cpus": os.cpu_count(),
            "system": platform.platform(),
        },
        "versions": {"python": sys.version.split()[0], **_versions()},
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
    folder.write(RUN, values)


def _versions() -> dict[str, str]:
    return {package: found for package in _PACKAGES if (found := _version(package)) is not None}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
