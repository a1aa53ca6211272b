"""What LightningCLI is given in tests: small modules by ``class_path``, and a quiet Trainer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_mp.cli.training.lightning_cli import PlanCLI, run
from lightning_mp.errors import Fault, PlanError

PLAIN = """\
plan:
  precision: bf16-mixed
model:
  class_path: support.lightning_cli.Net
  init_args:
    width: 4
data:
  class_path: support.lightning_cli.Rows
  init_args:
    rows: 12
trainer:
  accelerator: cpu
  devices: 1
  max_steps: 3
  logger: false
  enable_progress_bar: false
  enable_model_summary: false
  callbacks:
  - class_path: lightning_mp.callbacks.TrainingHealth
    init_args:
      report: false
"""
#: the same, for a class whose arguments stand below ``model`` themselves
TYPED = """\
seed_everything: 0
plan: bf16-mixed
model: {width: 4}
data: {rows: 12}
trainer: {accelerator: cpu, devices: 1, max_steps: 3, logger: false, enable_progress_bar: false,
          enable_model_summary: false}
"""


class Net(LightningModule):
    """A norm, dropout and a linear layer; ``built`` counts how many were made."""

    built = 0

    def __init__(self, width: int, lr: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters()
        type(self).built += 1
        self.norm = torch.nn.LayerNorm(4)
        self.dropout = torch.nn.Dropout(0.25)
        self.layer = torch.nn.Linear(4, width)
        self.lr = lr

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.layer(self.dropout(self.norm(batch[0]))).float().pow(2).mean()

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("loss", self.training_step(batch, batch_idx), sync_dist=True)

    test_step = validation_step

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.layer(self.norm(batch[0]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), self.lr)


class Rows(LightningDataModule):
    """Fixed random rows of four numbers, shuffled for training."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.rows = TensorDataset(torch.randn(rows, 4, generator=torch.Generator().manual_seed(1)))

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(self.rows, batch_size=4, shuffle=True)

    def val_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(self.rows, batch_size=4)

    test_dataloader = predict_dataloader = val_dataloader


def fit(*arguments: str) -> list[str]:
    """``lightning-mp cli fit`` in this process, which must succeed; what was said."""
    said: list[str] = []
    assert run(["fit", *arguments], said.append) == 0
    return said


def refusal(*arguments: str) -> tuple[Fault, ...]:
    """The faults of arguments that are refused."""
    with pytest.raises(PlanError) as error:
        run(arguments, print)
    assert len(set(error.value.faults)) == len(error.value.faults)
    return error.value.faults


def composed(*arguments: Any, cli: type[PlanCLI] = PlanCLI, typed: bool = False) -> PlanCLI:
    """A PlanCLI that has built everything and runs nothing."""
    classes = (Net, Rows) if typed else ()
    return cli(*classes, args=list(arguments), run=False, parser_kwargs={"exit_on_error": False})
