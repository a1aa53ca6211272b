"""The project that the documentation's examples train: real, and small enough for a CPU."""

from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

CLASSES, LENGTH = 16, 8


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class MyModule(LightningModule):
    def __init__(self, width: int = 32, depth: int = 2, lr: float = 1e-3) -> None:
        super().__init__()
        self.lr = lr
        self.embed = nn.Embedding(CLASSES, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, CLASSES)

    def forward(self, ids: Tensor, gain: Tensor) -> Tensor:
        x = self.embed(ids) * gain
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        ids, gain, labels = batch
        return nn.functional.cross_entropy(self(ids, gain).flatten(0, 1).float(), labels.flatten())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), self.lr, fused=True)
        warm_up = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 5))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": warm_up, "interval": "step"}}


class MyData(LightningDataModule):
    def __init__(self, rows: int = 64, batch_size: int = 8, bad_row: int | None = None) -> None:
        super().__init__()
        ids = torch.randint(CLASSES, (rows, LENGTH), generator=torch.Generator().manual_seed(0))
        gain = torch.ones(rows, LENGTH, 1)
        if bad_row is not None:
            gain[bad_row] = torch.inf
        self.rows, self.batch_size = TensorDataset(ids, gain, ids), batch_size

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(self.rows, batch_size=self.batch_size)
