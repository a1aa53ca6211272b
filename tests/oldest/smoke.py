"""What two processes do under every strategy: fit, save, fit on, and resume from what was saved."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_mp import LossScaling, MixedPrecisionPlan, Pin, make_strategy

ALONE = "auto"


class Small(LightningModule):
    """A regression that keeps the losses of its steps; the same on every rank and at every start."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 1))
        self.losses: list[float] = []

    def training_step(self, batch: list[Tensor]) -> Tensor:
        loss = nn.functional.mse_loss(self.body(batch[0]), batch[1])
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]


class Staged(Small):
    """The same in stages, whose steps are the schedule's."""

    def pipeline_stage(self, index: int, count: int) -> nn.Module:
        return self.body[: len(self.body) - 1] if index == 0 else self.body[len(self.body) - 1 :]

    def pipeline_batch(self, batch: list[Tensor]) -> tuple[Tensor, Tensor]:
        return batch[0], batch[1]

    def pipeline_loss(self, output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.mse_loss(output, target)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(outputs["loss"].item())


def fit(name: str, folder: Path, ckpt_path: str | None = None) -> tuple[list[float], int]:
    """Two epochs of three steps, of which the first is saved; the losses, and how many steps were applied."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(12, 8, generator=generator)
    pins = [] if name.startswith("fsdp1") else [Pin("LayerNorm", "fp32")]
    plan = MixedPrecisionPlan("16-mixed", loss_scaling=LossScaling(init_scale=32.0, growth_interval=2), pins=pins)
    own = {"hsdp": {"device_mesh": (2, 1)}, "pipeline": {"microbatches": 2}}.get(name, {})
    alone = name == ALONE
    strategy = make_strategy(name, plan, **({} if alone else {"timeout": timedelta(seconds=60)}), **own)
    trainer = Trainer(
        accelerator="cpu",
        devices=1 if alone else 2,
        strategy=strategy,
        plugins=[plan],
        max_epochs=2,
        callbacks=[ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    module = Staged() if name == "pipeline" else Small()
    trainer.fit(module, DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4), ckpt_path=ckpt_path)
    return module.losses, plan.applied_steps


@dataclass(frozen=True)
class Resumed:
    """A run, and the run that resumes from its first epoch."""

    name: str
    folder: Path

    def run(self) -> tuple[tuple[list[float], int], tuple[list[float], int]]:
        whole = fit(self.name, self.folder)
        return whole, fit(self.name, self.folder / "again", str(self.folder / "epoch=0.ckpt"))
