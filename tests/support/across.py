"""Runs that are saved under one strategy and go on under another; the tests look at what came back."""

from __future__ import annotations

import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from lightning_mp import LossScaling, MixedPrecisionPlan, make_strategy
from support import language
from support.models import InfiniteGradient
from support.running import fit
from support.saved import Held, full_state
from support.saving import ResumableBatches
from support.sharded import WAIT
from support.traces import lightning_says

#: how long a run is, the step it is saved at, and the steps that overflow: two before, one after
STEPS, AT, OVERFLOWS = 12, 5, (1, 3, 6)
#: all that a scale is made of moves within the run: hysteresis is spent at step 1 and missing at step 6
RULE = LossScaling(init_scale=64.0, hysteresis=2, growth_interval=4)

#: what writes: a name for ``make_strategy`` and its keywords
WRITERS: dict[str, tuple[str, dict[str, Any]]] = {
    "ddp": ("ddp", WAIT),
    "fsdp2": ("fsdp2", WAIT),
    "fsdp2 file": ("fsdp2", {**WAIT, "save_distributed_checkpoint": False}),
    "fsdp1": ("fsdp1", WAIT),
    "zero1": ("deepspeed_zero1", WAIT),
    "zero2": ("deepspeed_zero2", WAIT),
    "zero3": ("deepspeed_zero3", WAIT),
}
READERS = ("ddp", "fsdp2", "fsdp1", "zero1", "zero2", "zero3")
#: a unit of its own beside the root's, in either model
_WRAPPED = {"held": "model.first", "llama": "LlamaDecoderLayer"}


@dataclass(frozen=True)
class Setting:
    model: str
    mode: str
    pins: dict[str, str] = field(default_factory=dict)


CASES: dict[str, Setting] = {
    "16-mixed": Setting("held", "16-mixed"),
    "32-true": Setting("held", "32-true"),
    "bf16-true": Setting("held", "bf16-true", {"norm": "fp32"}),
    "llama": Setting("llama", "16-mixed", {"*norm*": "fp32"}),
    "half pin": Setting("llama", "16-mixed", {"*norm*": "fp32", "lm_head": "bf16"}),
}


class Carried(Held):
    """Two parameter groups with rates of their own; gradients overflow on the last rank alone."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return _overflowing(self, super().training_step(batch, batch_idx))

    def configure_optimizers(self) -> Any:
        made = super().configure_optimizers()
        groups = [{"params": g["params"], "weight_decay": g["weight_decay"]} for g in made["optimizer"].param_groups]
        return _scheduled(torch.optim.AdamW(groups, lr=1e-2, eps=1e-4), [1e-2, 5e-3])

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """What the run is made of, the strategy writes."""


class CarriedLanguage(language.Language):
    def __init__(self) -> None:
        super().__init__(language.llama())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return _overflowing(self, super().training_step(batch, batch_idx))

    def configure_optimizers(self) -> Any:
        return _scheduled(super().configure_optimizers(), [1e-2])


def _scheduled(optimizer: Any, rates: list[float]) -> dict[str, Any]:
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rates, total_steps=STEPS + 1)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def _overflowing(module: LightningModule, loss: Tensor) -> Tensor:
    last = module.global_rank == module.trainer.world_size - 1
    return InfiniteGradient.apply(loss) if last and module.trainer.global_step in OVERFLOWS else loss


class Watch(Callback):
    """Weights and the plan's state at the start, at the save and at the end; rates, scales and skips by step."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self.seen: dict[str, Any] = {"rates": [], "scales": [], "skipped": []}

    def _now(self, trainer: Trainer, module: LightningModule) -> dict[str, Any]:
        plan: Any = trainer.precision_plugin
        return {"weights": full_state(module), "plan": plan.state_dict(), "step": trainer.global_step}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.seen["hosted"] = {
            "wrapped": trainer.strategy.model is not pl_module,
            "group": torch.distributed.is_initialized(),
            "launcher": trainer.strategy.launcher is not None,
        }
        self.seen["start"] = self._now(trainer, pl_module)

    def on_train_batch_start(self, trainer: Trainer, *rest: Any) -> None:
        # ZeRO may have split a group: its parts have one rate
        self.seen["rates"].append(sorted({group["lr"] for group in trainer.optimizers[0].param_groups}))

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *rest: Any) -> None:
        plan: Any = trainer.precision_plugin
        self.seen["scales"].append(None if plan.scaler is None else plan.scaler.get_scale())
        self.seen["skipped"].append(plan.step_skipped)
        if self.path is not None and trainer.global_step == AT:
            trainer.save_checkpoint(self.path)
            self.seen["saved"] = self._now(trainer, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.seen["end"] = self._now(trainer, pl_module)


def plan_of(case: str) -> MixedPrecisionPlan:
    mode, pins = CASES[case].mode, CASES[case].pins
    scaling = {"loss_scaling": RULE} if mode.startswith("16") else {}
    return MixedPrecisionPlan(mode, pins=pins, **scaling)


def module_of(case: str) -> LightningModule:
    return CarriedLanguage() if CASES[case].model == "llama" else Carried()


def host(name: str, plan: MixedPrecisionPlan, case: str) -> dict[str, Any]:
    """Trainer arguments: ``stock`` and ``auto`` are one device, all else two processes."""
    if name == "stock":
        return {"devices": 1}
    if name == "auto":
        return {"devices": 1, "strategy": make_strategy("auto", plan)}
    strategy, options = WRITERS[name]
    wrap = {"wrap": _WRAPPED[CASES[case].model]} if strategy.startswith("fsdp") else {}
    made = make_strategy(strategy, plan, **options, **wrap)
    return {"devices": 2, "strategy": made, "use_distributed_sampler": False}


@dataclass(frozen=True)
class Saved:
    folder: Path
    case: str
    writer: str

    @property
    def path(self) -> Path:
        return self.folder / self.case / self.writer / "saved.ckpt"

    def run(self) -> dict[str, Any]:
        return _trained(self.case, self.writer, Watch(self.path))


@dataclass(frozen=True)
class Resumed:
    path: Path
    case: str
    reader: str

    def run(self) -> dict[str, Any]:
        return _trained(self.case, self.reader, Watch(), self.path)


@dataclass(frozen=True)
class Refused:
    resumed: Resumed

    def run(self) -> str:
        try:
            self.resumed.run()
        except BaseException as error:  # torch's CheckpointException is no Exception
            return "".join(traceback.format_exception_only(error))
        return "it went on"


def _trained(case: str, name: str, watch: Watch, ckpt_path: Path | None = None) -> dict[str, Any]:
    plan, module = plan_of(case), module_of(case)
    data = ResumableBatches(language.tokens(32) if CASES[case].model == "llama" else None)
    options: dict[str, Any] = {"max_epochs": 2, "max_steps": STEPS, "gradient_clip_val": 0.5}
    options |= {"plugins": [plan], "callbacks": [watch], "ckpt_path": ckpt_path, **host(name, plan, case)}
    with lightning_says() as lines:
        fit(module, data=data, **options)
    return {**watch.seen, "said": lines, "losses": module.losses}
