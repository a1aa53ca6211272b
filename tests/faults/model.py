"""The healthy runs that faults are put into: a small GPT-2 and a small net, on data that never repeats."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from support import language

ROWS, LENGTH, FEATURES = 8, 24, 16
LEARNING_RATE = 3e-3


class Patient(LightningModule):
    """A model whose gradients are multiplied by ``gradient_factor``; the loss stays what it is."""

    def __init__(self) -> None:
        super().__init__()
        self.gradient_factor = 1.0

    def loss(self, batch: Any) -> Tensor:
        raise NotImplementedError

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return Multiplied.apply(self.loss(batch), self.gradient_factor)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=LEARNING_RATE, fused=True)


class Language(Patient):
    """Next tokens of sentences from a fixed Markov chain, which has an entropy to stop at."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.model = language.gpt2(n_positions=LENGTH).train()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.model.apply(self.model._init_weights)

    def loss(self, batch: Any) -> Tensor:
        return self.model(input_ids=batch, labels=batch).loss


class Regression(Patient):
    """A function of 16 numbers, with noise."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.model = nn.Sequential(
                nn.Linear(FEATURES, 32), nn.LayerNorm(32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1)
            )

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return (self.model(x).float() - y).pow(2).mean()


class Multiplied(torch.autograd.Function):
    """The identity, whose gradient is multiplied."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gradient * ctx.factor, None


class Batches:
    """``count`` batches, each made when it is asked for; ``before`` is called with its number first."""

    def __init__(self, make: Callable[[torch.Generator], Any], count: int, seed: int) -> None:
        self.make, self.count, self.seed = make, count, seed
        self.before: Callable[[int], None] = lambda number: None
        self.change: Callable[[int, Any], Any] = lambda number, batch: batch

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Any]:
        draw = torch.Generator().manual_seed(self.seed)
        for number in range(self.count):
            self.before(number)
            yield self.change(number, self.make(draw))


def sentences(draw: torch.Generator) -> Tensor:
    """Token ids (ROWS, LENGTH)."""
    ids = [torch.randint(0, language.VOCABULARY, (ROWS,), generator=draw)]
    for _ in range(LENGTH - 1):
        ids.append(torch.multinomial(_CHAIN[ids[-1]], 1, generator=draw)[:, 0])
    return torch.stack(ids, 1)


def points(draw: torch.Generator) -> tuple[Tensor, Tensor]:
    """Numbers (ROWS, FEATURES) and their function (ROWS, 1)."""
    x = torch.randn(ROWS, FEATURES, generator=draw)
    return x, x.sum(1, keepdim=True) + 0.5 * torch.randn(ROWS, 1, generator=draw)


_LOGITS = torch.randn(language.VOCABULARY, language.VOCABULARY, generator=torch.Generator().manual_seed(1))
_CHAIN = (2 * _LOGITS).softmax(-1)
