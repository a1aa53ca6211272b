"""What ``lightning-mp train`` is given in tests: small modules by ``_target_``, a short text, and a quiet Trainer."""

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_mp import MixedPrecisionPlan
from lightning_mp.cli.train import run as train
from lightning_mp.errors import Fault, PlanError

#: three steps on the CPU of a short text, so that a run takes a second or two
QUICK = (
    "trainer=debug",
    "trainer.enable_progress_bar=false",
    "trainer.enable_model_summary=false",
    f"data.text={argparse.__file__}",
)
PLAIN = """\
plan:
  precision: bf16-mixed
model:
  _target_: support.training.Net
  width: 4
data:
  _target_: support.training.loader
  rows: 12
trainer:
  accelerator: cpu
  devices: 1
  max_steps: 3
  logger: false
  enable_progress_bar: false
  enable_model_summary: false
"""


class Net(LightningModule):
    built = 0

    def __init__(self, width: int, lr: float = 0.1) -> None:
        super().__init__()
        type(self).built += 1
        self.layer = torch.nn.Linear(width, 1)
        self.lr = lr

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.layer(batch[0]).pow(2).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), self.lr)


class TruePlan(MixedPrecisionPlan):
    def __init__(self) -> None:
        super().__init__("bf16-true")


class Wide(Net):
    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.layer = torch.nn.Linear(width, 16)


def loader(rows: int, width: int = 4) -> DataLoader[tuple[Tensor, ...]]:
    return DataLoader(TensorDataset(torch.randn(rows, width, generator=torch.Generator().manual_seed(1))), batch_size=4)


def run(*arguments: str) -> list[str]:
    said: list[str] = []
    assert train(arguments, said.append) == 0
    return said


def refusal(*arguments: str, multirun: bool = False) -> tuple[Fault, ...]:
    with pytest.raises(PlanError) as error:
        train(arguments, print, multirun=multirun)
    assert len(set(error.value.faults)) == len(error.value.faults)
    return error.value.faults


def readings(folder: str | Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]


def losses(folder: str | Path) -> list[float]:
    return [row["train/loss"] for row in readings(folder) if "train/loss" in row]


def write(folder: Path, text: str, name: str = "run.yaml") -> str:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return str(path)
