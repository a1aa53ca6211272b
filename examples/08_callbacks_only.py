"""Callbacks alone, on Lightning's own bf16 plugin: fp32 norms, recomputed activations, and a guard against NaN.

    python examples/08_callbacks_only.py

A transformer learns to write comments: only their bytes count, as only the answers do in instruction tuning. A batch
without a comment has the mean of nothing as its loss, NaN, and stock Lightning would step with it.
"""

import argparse
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_mp import callbacks as mp


class Comments(LightningModule):
    """A batch is bytes and targets, int64 of (batch, 64); a target of -100 does not count."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(64, nhead=4, dim_feedforward=128, dropout=0.0, batch_first=True)
        self.embedding, self.encoder = nn.Embedding(256, 64), nn.TransformerEncoder(layer, num_layers=2)
        self.head = nn.Linear(64, 256)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        text, targets = batch[0][:, :-1], batch[1][:, 1:]
        mask = nn.Transformer.generate_square_subsequent_mask(text.shape[1], self.device)
        scores = self.head(self.encoder(self.embedding(text), mask, is_causal=True))
        return nn.functional.cross_entropy(scores.flatten(0, 1), targets.flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def batches() -> DataLoader[tuple[Tensor, ...]]:
    source, targets = Path(argparse.__file__).read_bytes(), []
    for line in source.splitlines(keepends=True):
        code, mark, comment = line.partition(b"#")
        targets += [-100] * len(code + mark) + list(comment)
    windows = (torch.tensor(list(values)).unfold(0, 64, 64) for values in (source, targets))
    return DataLoader(TensorDataset(*windows), batch_size=64)


if __name__ == "__main__":
    seed_everything(0)
    acting = [mp.EnableTF32(), mp.DtypePinning({"*norm*": "fp32"}), mp.ActivationCheckpointing("*.layers.*")]
    health, guard, audit = mp.TrainingHealth(), mp.NonFiniteGuard(), mp.PrecisionAudit()
    watching = [health, guard, audit]
    trainer = Trainer(precision="bf16-mixed", callbacks=acting + watching, max_epochs=1, devices=1, logger=False)
    trainer.fit(Comments(), batches())
    empty = [event.evidence["batch_idx"] for event in guard.events]
    print(f"audit: {audit.report.summary}")
    print(f"guard: {guard.skipped_steps} of {trainer.global_step} steps skipped, batches {empty} have no comment")
    print(f"health: loss {health.rows[0]['train/loss']:.2f} at first, {health.rows[-1]['train/loss']:.2f} at last")
