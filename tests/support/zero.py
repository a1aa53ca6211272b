"""What each rank of a two-process run under DeepSpeed does; the tests look at what came back."""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Callable
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import LambdaLR, LinearLR, OneCycleLR, SequentialLR
from torch.utils.data import DataLoader, TensorDataset

from lightning_mp import LossScaling, MixedPrecisionPlan, NonFinite, NonFiniteError, PlanError, make_strategy
from support.ddp import BAD_RANK, STATIC, Ranked
from support.models import InfiniteGradient, Regression, batches
from support.oracles import SCALED, plan_for
from support.running import fit, trainer
from support.saving import ResumableBatches, SaveAt

ZERO = {
    "1": "deepspeed_zero1",
    "2": "deepspeed_zero2",
    "3": "deepspeed_zero3",
    "2 offload": "deepspeed_zero2_offload",
    "3 offload": "deepspeed_zero3_offload",
}
_WAIT = {"timeout": timedelta(seconds=60)}


def on(plan: MixedPrecisionPlan, stage: str | None, **options: Any) -> dict[str, Any]:
    """Trainer arguments for a ZeRO stage, or for DDP where there is none."""
    name = "ddp" if stage is None else ZERO[stage]
    if stage is None:
        options = {"process_group_backend": "gloo"}
    strategy = make_strategy(name, plan, **_WAIT, **options)
    return {"plugins": [plan], "strategy": strategy, "devices": 2, "use_distributed_sampler": False}


def weights(module: nn.Module) -> dict[str, Tensor]:
    """A copy of every parameter, gathered where ZeRO-3 split it."""
    from deepspeed.runtime.zero import GatheredParameters

    parameters = dict(module.named_parameters())
    split = [parameter for parameter in parameters.values() if hasattr(parameter, "ds_id")]
    with GatheredParameters(split, enabled=bool(split)):
        return {name: parameter.detach().clone() for name, parameter in parameters.items()}


class Watch(Callback):
    """An entry a training batch: was it skipped, the scale, the learning rates, the norm."""

    def __init__(self) -> None:
        self.skipped: list[bool] = []
        self.scales: list[float] = []
        self.rates: list[list[float]] = []
        self.norms: list[float] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *rest: Any) -> None:
        plan: Any = trainer.precision_plugin
        self.skipped.append(plan.step_skipped)
        self.scales.append(1.0 if plan.scaler is None else plan.scaler.get_scale())
        self.rates.append([group["lr"] for group in trainer.optimizers[0].param_groups])
        norm = plan.last_grad_norm
        self.norms.append(float("nan") if norm is None else float(norm))
