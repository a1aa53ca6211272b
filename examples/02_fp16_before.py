"""A project on stock Lightning in fp16, as it was before lightning_mp; 02_fp16_after.py is the same project with it.

    python examples/02_fp16_before.py

A small network learns to tell the next byte of Python source from the sixteen before it. On a CPU, Lightning turns its
own 16-mixed into bf16.
"""

import argparse
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader


class NextByte(LightningModule):
    """A batch is int64 of (batch, 17)."""

    def __init__(self) -> None:
        super().__init__()
        layers = (nn.Embedding(256, 32), nn.Flatten(), nn.Linear(512, 256), nn.LayerNorm(256), nn.ReLU())
        self.network = nn.Sequential(*layers, nn.Linear(256, 256))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = nn.functional.cross_entropy(self.network(batch[:, :-1]), batch[:, -1])
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> dict[str, object]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=2e-3)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=200)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


if __name__ == "__main__":
    seed_everything(0)
    source = torch.tensor(list(Path(argparse.__file__).read_bytes()))
    trainer = Trainer(
        precision="16-mixed",
        max_steps=200,
        devices=1,
        gradient_clip_val=1.0,
        logger=CSVLogger("runs", name="next_byte"),
    )
    trainer.fit(NextByte(), DataLoader(source.unfold(0, 17, 1), batch_size=512, shuffle=True))
    print(f"train loss {trainer.callback_metrics['train_loss']:.2f}")
