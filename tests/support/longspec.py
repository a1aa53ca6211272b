"""Runs ``experiment=longspec`` as the command does and notes what each rank sees of it, with torch's own means."""

from __future__ import annotations

import argparse
import itertools
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
from lightning_mp.errors import LossScaleError
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
        #: by module: dtypes of (first input, output), and whether its forward ran within a backward pass
        self.dtypes: dict[str, set[tuple[Any, Any]]] = defaultdict(set)
        self.again: set[str] = set()
        self.found: dict[str, Any] = {"batches": [], "steps": [], "gradients": set()}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        engine: Any = trainer.strategy.deepspeed_engine
        self.module: Any = pl_module
        self.found |= {
            "start": _weights(pl_module),
            "switches": _switches(),
            "trained": {name for name, weight in pl_module.named_parameters() if weight.requires_grad},
            "fp16": {key: getattr(engine._config.float16_config, key) for key in WHOLE_FP16},
            "stage": engine.zero_optimization_stage(),
            "accumulation": trainer.accumulate_grad_batches,
            "processes": (dist.get_world_size(), dist.get_backend()),
        }
        for name, module in pl_module.named_modules():
            self._watch(name, module)
        for weight in pl_module.parameters():
            if weight.requires_grad:
                weight.register_hook(lambda gradient: self.found["gradients"].add(gradient.dtype))
        adamw: Any = trainer.optimizers[0].optimizer
        self.found["optimizer"] = type(adamw)
        adamw.register_step_pre_hook(self._step)

    def _watch(self, name: str, module: nn.Module) -> None:
        def after(_module: nn.Module, inputs: Any, output: Any) -> None:
            if torch._C._current_graph_task_id() != -1:
                self.again.add(name)
            if inputs and isinstance(inputs[0], Tensor) and isinstance(output, Tensor):
                self.dtypes[name].add((inputs[0].dtype, output.dtype))

        module.register_forward_hook(after)

    def _step(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        """What the AdamW inside of ZeRO is about to step on."""
        masters = [master for group in optimizer.param_groups for master in group["params"]]
        squares = torch.stack([master.grad.double().pow(2).sum() for master in masters]).sum()
        dist.all_reduce(squares)
        group = optimizer.param_groups[0]
        given = {key: group[key] for key in ("lr", "betas")}
        self.found["steps"].append(
            {
                **given,
                "norm": squares.sqrt().item(),
                "masters": {master.dtype for master in masters},
                "numbers": sum(master.numel() for master in masters),
            }
        )

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Tensor, batch_idx: int
    ) -> None:
        plan: Any = trainer.precision_plugin
        module: Any = pl_module
        self.found["batches"].append(
            {
                "shape": tuple(batch.shape),
                "loss": outputs["loss"].item() * trainer.accumulate_grad_batches,
                "applied": plan.applied_steps,
                "skipped": plan.skipped_steps,
                "scale": None if plan.scaler is None else plan.scaler.get_scale(),
                "norm": None if plan.last_grad_norm is None else plan.last_grad_norm.item(),
                "use_cache": module.model.config.use_cache,
            }
        )

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        adamw: Any = trainer.optimizers[0].optimizer
        states = (value for state in adamw.state.values() for key, value in state.items() if key != "step")
        self.found["state"] = {value.dtype for value in states}
        self.found["end"] = _weights(pl_module)
        audit = next(callback for callback in trainer.callbacks if isinstance(callback, PrecisionAudit))
        self.found["audit"] = audit.report.to_dict()

    def close(self) -> dict[str, Any]:
        """All that was found, once the Trainer has let go of everything."""
        after = {"use_cache after": self.module.model.config.use_cache, "switches after": _switches()}
        return {**self.found, **after, "dtypes": dict(self.dtypes), "again": self.again}


def _weights(module: nn.Module) -> dict[str, Tensor]:
    return {name: weight.detach().cpu().clone() for name, weight in module.named_parameters()}


def _switches() -> tuple[bool, bool]:
    return torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32


@dataclass(frozen=True)
class Experiment:
    """Trains as ``lightning-mp train`` does, with DeepSpeed as it is on CUDA; what was seen, and how it ended."""

    arguments: tuple[str, ...]
    folder: Path

    def run(self) -> dict[str, Any]:
        Look.last, ended = None, "finished"
        with fp16_supported():
            try:
                assert train([*self.arguments, f"run_dir={self.folder}", *LOOKING], lambda _: None) == 0
            except LossScaleError as error:
                ended = str(error)
        assert Look.last is not None
        found = Look.last.close()
        every = found["accumulation"]
        skips = [batch["skipped"] for batch in found["batches"][every - 1 :: every]]
        return {**found, "ended": ended, "theirs": _scales_of_deepspeed(found["fp16"], skips)}


def _scales_of_deepspeed(block: dict[str, Any], skips: Sequence[int]) -> tuple[list[float], str]:
    """DeepSpeed's own scale after each step, from how many were skipped until then; and what one overflow more says."""
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

    scaler = DynamicLossScaler(
        init_scale=2.0 ** block["initial_scale_power"],
        scale_window=block["loss_scale_window"],
        min_scale=block["min_loss_scale"],
        delayed_shift=block["hysteresis"],
        consecutive_hysteresis=block["consecutive_hysteresis"],
    )
    scales: list[float] = []
    for before, now in itertools.pairwise([0, *skips]):
        scaler.update_scale(now > before)
        scales.append(scaler.cur_scale)
    try:
        scaler.update_scale(True)
    except Exception as error:
        return scales, str(error)
    return scales, ""
