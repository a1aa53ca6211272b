"""Runs ``experiment=longspec`` as the command does and notes what each rank sees of it, with torch's own means."""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn

from lightning_mp.callbacks import PrecisionAudit
from lightning_mp.cli.train import run as train
from lightning_mp.demo.language_model import CausalLM
from support.deepspeed_json import WHOLE_FP16, fp16_supported
from support.models import InfiniteGradient

#: added to every run: a short text, and the callback that looks instead of those that write
LOOKING = (
    "+callbacks.look._target_=support.longspec.Look",
    "callbacks.training_health=null",
    f"data.text={argparse.__file__}",
    "data.val_batches=2",
    "trainer.num_sanity_val_steps=0",
    "trainer.enable_checkpointing=false",
    "trainer.enable_progress_bar=false",
    "trainer.enable_model_summary=false",
)


class Sick(CausalLM):
    """The loss is ``factor`` times what it is; gradients overflow on rank 1 alone in the steps ``overflow_at``."""

    def __init__(self, *given: Any, overflow_at: Sequence[int] = (), factor: float = 1.0, **options: Any) -> None:
        super().__init__(*given, **options)
        self.overflow_at, self.factor = overflow_at, factor

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx) * self.factor
        if self.global_rank == 1 and batch_idx // self.trainer.accumulate_grad_batches in self.overflow_at:
            trained = next(parameter for parameter in self.parameters() if parameter.requires_grad)
            loss = loss + InfiniteGradient.apply(trained.float().sum() * 0)
        return loss


class Look(Callback):
    """Fills ``found``, plain data; ``last`` is the callback of the present run."""

    last: ClassVar[Look | None] = None

    def __init__(self) -> None:
        type(self).last = self
        #: by module: dtypes of (first input, output)
        self.dtypes: dict[str, set[tuple[Any, Any]]] = defaultdict(set)
        self.found: dict[str, Any] = {"batches": [], "steps": []}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        engine: Any = trainer.strategy.deepspeed_engine
        self.found |= {
            "start": _weights(pl_module),
            "switches": _switches(),
            "trained": {name for name, weight in pl_module.named_parameters() if weight.requires_grad},
            "fp16": {key: getattr(engine._config.float16_config, key) for key in WHOLE_FP16},
            "stage": engine.zero_optimization_stage(),
            "processes": (dist.get_world_size(), dist.get_backend()),
        }
        for name, module in pl_module.named_modules():
            self._watch(name, module)
        adamw: Any = trainer.optimizers[0].optimizer
        adamw.register_step_pre_hook(self._step)

    def _watch(self, name: str, module: nn.Module) -> None:
        def after(_module: nn.Module, inputs: Any, output: Any) -> None:
            if inputs and isinstance(inputs[0], Tensor) and isinstance(output, Tensor):
                self.dtypes[name].add((inputs[0].dtype, output.dtype))

        module.register_forward_hook(after)

    def _step(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        """What the AdamW inside of ZeRO is about to step on."""
        masters = [master for group in optimizer.param_groups for master in group["params"]]
        squares = torch.stack([master.grad.double().pow(2).sum() for master in masters]).sum()
        dist.all_reduce(squares)
        step = {"norm": squares.sqrt().item(), "masters": {master.dtype for master in masters}}
        self.found["steps"].append(step | {"lr": optimizer.param_groups[0]["lr"]})

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Tensor, batch_idx: int
    ) -> None:
        plan: Any = trainer.precision_plugin
        self.found["batches"].append(
            {
                "shape": tuple(batch.shape),
                "loss": outputs["loss"].item() * trainer.accumulate_grad_batches,
                "applied": plan.applied_steps,
                "skipped": plan.skipped_steps,
                "scale": None if plan.scaler is None else plan.scaler.get_scale(),
                "norm": None if plan.last_grad_norm is None else plan.last_grad_norm.item(),
            }
        )

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.found["end"] = _weights(pl_module)
        audit = next(callback for callback in trainer.callbacks if isinstance(callback, PrecisionAudit))
        self.found["audit"] = audit.report.to_dict()

    def close(self) -> dict[str, Any]:
        """All that was found, once the Trainer has let go of everything."""
        return {**self.found, "switches after": _switches(), "dtypes": dict(self.dtypes)}


def _weights(module: nn.Module) -> dict[str, Tensor]:
    return {name: weight.detach().cpu().clone() for name, weight in module.named_parameters()}


def _switches() -> tuple[bool, bool]:
    return torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32


@dataclass(frozen=True)
class Experiment:
    """Trains as ``lightning-mp train`` does, with DeepSpeed as it is on CUDA; what was seen."""

    arguments: tuple[str, ...]
    folder: Path

    def run(self) -> dict[str, Any]:
        Look.last = None
        with fp16_supported():
            assert train([*self.arguments, f"run_dir={self.folder}", *LOOKING], lambda _: None) == 0
        assert Look.last is not None
        return Look.last.close()
