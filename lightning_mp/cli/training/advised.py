"""``lightning-mp advise CONFIG``: the memory of the run that a config describes, predicted; and measured here."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lightning_mp.cli.training import build, one_run
from lightning_mp.cli.training.compose import Composed
from lightning_mp.compat.lightning import LightningModule
from lightning_mp.demo.quiet import quiet
from lightning_mp.errors import Faults
from lightning_mp.numerics.peak_memory import PeakMemory
from lightning_mp.planner.prediction import MemoryPrediction
from lightning_mp.precision import MixedPrecisionPlan
from lightning_mp.tracing.fitting import Fit, fits, rows_of
from lightning_mp.tracing.predict import predict_memory
from lightning_mp.tracing.run import ALONE, LEFT_OUT, Again

SUBJECT = "advise"


@dataclass(frozen=True)
class Advised:
    """The run as it is written, what each way of checkpointing makes of it, and bytes measured here, if any."""

    prediction: MemoryPrediction
    strategy: str
    devices: int
    rows: int
    fits: tuple[Fit, ...]
    measured: int | None


def advised(arguments: Sequence[str], *, memory: float, measure: bool, config_dirs: Sequence[Path] = ()) -> Advised:
    """Predict the memory of ``[CONFIG] key=value …`` on a device of ``memory`` bytes; with ``measure`` run it here.

    Measured are two optimizer steps of one process, beside the prediction for one process: one has no optimizer state.

    Raises:
        PlanError: what was given cannot run; every fault at once.
        MissingExtraError: an optional package that is needed is not installed.
    """
    faults = Faults(SUBJECT)
    with redirect_stdout(sys.stderr), one_run.composed(arguments, faults, config_dirs) as job:
        config, regime = _checked(job, faults)
        trainer = dict(regime.trainer)
        devices = 1 if measure else _whole(trainer.get("devices")) * _whole(trainer.get("num_nodes"))
        written = config.get("strategy") or "auto"
        name = str(written if isinstance(written, str) else written.get("name", written.get("_target_", "auto")))
        model, batch = _parts(config, faults)
        given = {key: value for key, value in trainer.items() if key not in {*LEFT_OUT, "strategy", "devices"}}
        run: dict[str, Any] = {"devices": devices, "trainer_args": given}
        prediction = predict_memory(model, batch, regime.plan, strategy=trainer["strategy"], **run)
        if measure:
            return Advised(prediction, name, devices, rows_of(batch), (), _measured(job, faults))

        def strategy(plan: MixedPrecisionPlan) -> Any:
            return build.strategy_of(written, plan, faults)

        found = tuple(fits(model, batch, regime.plan, memory, strategy, **run))
        return Advised(prediction, name, devices, rows_of(batch), found, None)


def _checked(job: Composed, faults: Faults) -> tuple[dict[str, Any], build.Regime]:
    config = {**one_run.checked(job, SUBJECT, faults), "callbacks": None}  # those may write
    return config, faults.sound(build.regime(config, job.places, faults))


def _parts(config: dict[str, Any], faults: Faults) -> tuple[LightningModule, Any]:
    build.seed(config)
    model, data = build.parts(config, faults)
    return model, next(iter(build.training_batches(data, model)))


def _measured(job: Composed, faults: Faults) -> int:
    """The allocator's peak over making the model and two optimizer steps in this process."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with quiet(), warnings.catch_warnings(), PeakMemory(device) as peak:
        warnings.simplefilter("ignore")  # of two steps without validation
        config, regime = _checked(job, faults)
        model, batch = _parts(config, faults)
        mine = {**regime.trainer, **ALONE, "devices": 1, "num_nodes": 1, "logger": False, "callbacks": None}
        trainer = build.trainer({**mine, "accelerator": device}, faults)
        trainer.fit(model, train_dataloaders=Again(batch))
    return peak.bytes


def _whole(given: Any) -> int:
    return given if isinstance(given, int) and given > 0 else 1
