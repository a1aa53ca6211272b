"""The two shapes that are timed: one where arithmetic is everything, one where only overhead shows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel

VOCABULARY, CONTEXT = 2048, 128


@dataclass(frozen=True)
class Shape:
    """A model, its data, and how long to run it."""

    name: str
    module: Callable[[], LightningModule]
    data: Callable[[], DataLoader[Any]]
    rounds: int
    steps: int


class LanguageModel(LightningModule):
    """GPT-2 from a config, next-token loss, AdamW."""

    def __init__(self) -> None:
        super().__init__()
        size = {"n_embd": 192, "n_layer": 4, "n_head": 6}
        tokens = {"vocab_size": VOCABULARY, "n_positions": CONTEXT, "bos_token_id": 0, "eos_token_id": 0}
        self.model = GPT2LMHeadModel(GPT2Config(**size, **tokens, use_cache=False))

    def training_step(self, batch: tuple[Tensor], batch_idx: int) -> Tensor:
        """Cross entropy of the next token."""
        return self.model(input_ids=batch[0], labels=batch[0]).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW with torch's defaults: stock Lightning cannot clip a fused one."""
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


class Tiny(LightningModule):
    """A net so small that a step is Lightning's loop and little else."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 1))

    def training_step(self, batch: tuple[Tensor], batch_idx: int) -> Tensor:
        """Mean square of the output."""
        return self.net(batch[0]).float().pow(2).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW with torch's defaults."""
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


def tokens() -> DataLoader[Any]:
    """Random tokens, 8 sequences a batch."""
    generator = torch.Generator().manual_seed(0)
    return DataLoader(TensorDataset(torch.randint(VOCABULARY, (512, CONTEXT), generator=generator)), batch_size=8)


def _vectors() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(0)
    return DataLoader(TensorDataset(torch.randn(8192, 32, generator=generator)), batch_size=16)


SHAPES = (
    Shape("compute-bound GPT-2", LanguageModel, tokens, rounds=6, steps=17),
    Shape("tiny MLP", Tiny, _vectors, rounds=10, steps=305),
)
