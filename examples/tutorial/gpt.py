# gpt.py
import argparse
from pathlib import Path

import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

LENGTH, WIDTH, VOCABULARY = 64, 64, 256  # tokens are bytes


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = (
            nn.Linear(WIDTH, 3 * WIDTH),
            nn.Linear(WIDTH, WIDTH),
        )
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x):
        q, k, v = (
            t.unflatten(-1, (4, -1)).transpose(1, 2)
            for t in self.qkv(self.norm1(x)).chunk(3, dim=-1)
        )
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).flatten(-2))
        return x + self.mlp(self.norm2(x))


class GPT(LightningModule):
    def __init__(self, layers: int = 2):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.position = (
            nn.Embedding(VOCABULARY, WIDTH),
            nn.Embedding(LENGTH, WIDTH),
        )
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def training_step(self, batch, batch_idx):
        text, weight = batch
        x = self.embed(text[:, :-1]) + self.position.weight
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        losses = nn.functional.cross_entropy(
            logits.flatten(0, 1).float(),
            text[:, 1:].flatten(),
            reduction="none",
        )
        return (losses.view(len(text), -1).mean(1) * weight).mean()

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3, fused=True)
        warm_up = torch.optim.lr_scheduler.LinearLR(
            optimizer, 0.1, total_iters=10
        )
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": warm_up, "interval": "step"},
        }


def batches(bad_row: int | None = None) -> DataLoader:
    """Python's own argparse.py, 8 rows a batch; a bad row weighs NaN."""
    raw = torch.tensor(list(Path(argparse.__file__).read_bytes()))
    rows = raw[: len(raw) // (LENGTH + 1) * (LENGTH + 1)].view(-1, LENGTH + 1)
    weight = torch.ones(len(rows))
    if bad_row is not None:
        weight[bad_row] = torch.nan
    return DataLoader(TensorDataset(rows, weight), batch_size=8)
