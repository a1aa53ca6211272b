"""A real Trainer, quiet and on the CPU; and what a call is refused for."""

from collections.abc import Callable
from typing import Any

import pytest

from lightning_mp.compat.lightning import LightningModule, Trainer
from lightning_mp.errors import Fault, PlanError
from support.models import batches


def trainer(**arguments: Any) -> Trainer:
    """A Trainer that prints and writes nothing, one epoch on the CPU unless told otherwise."""
    quiet = {
        "accelerator": "cpu", "devices": 1, "max_epochs": 1, "logger": False, "enable_checkpointing": False,
        "enable_progress_bar": False, "enable_model_summary": False,
    }  # fmt: skip
    return Trainer(**{**quiet, **arguments})


def fit(module: LightningModule, *, data: Any = None, ckpt_path: Any = None, **arguments: Any) -> Trainer:
    """Train ``module`` on ``support.models.batches()`` (8 steps) and hand the Trainer back."""
    runner = trainer(**arguments)
    runner.fit(module, batches() if data is None else data, ckpt_path=ckpt_path)
    return runner


def faults_of(call: Callable[[], object]) -> tuple[Fault, ...]:
    """What a call is refused for."""
    with pytest.raises(PlanError) as error:
        call()
    return error.value.faults
