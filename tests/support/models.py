"""Small LightningModules that record what happens to them."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_mp.compat.lightning import LightningModule

FEATURES, HIDDEN = 16, 32


def batches(rows: int = 64, batch_size: int = 8) -> DataLoader[tuple[Tensor, ...]]:
    """A fixed regression problem: x (rows, FEATURES) and the sum of its features, in a fixed order."""
    x = torch.randn(rows, FEATURES, generator=torch.Generator().manual_seed(7))
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=batch_size)


class Regression(LightningModule):
    """A two-layer net with a norm; ``overflow_at`` makes chosen steps' gradients infinite.

    ``losses`` and ``lrs`` record each training step; ``optimizer`` is called with the parameters, ``scheduler`` (if
    given) with the optimizer, at step interval.
    """

    def __init__(self, optimizer: Any = None, scheduler: Any = None, overflow_at: tuple[int, ...] = ()) -> None:
        super().__init__()
        generator = torch.get_rng_state()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.LayerNorm(HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 1))
        torch.set_rng_state(generator)
        self.make_optimizer = optimizer or (lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True))
        self.make_scheduler = scheduler
        self.overflow_at = overflow_at
        self.losses: list[float] = []
        self.lrs: list[float] = []

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return (self.net(x).float() - y.float()).pow(2).mean()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        loss = self.loss(batch)
        self.losses.append(loss.item())
        self.lrs.append(self.trainer.optimizers[0].param_groups[0]["lr"])
        if self.trainer.global_step in self.overflow_at:
            # finite loss, infinite gradients: what an fp16 overflow in the backward pass looks like
            loss = loss + InfiniteGradient.apply(self.net[3].bias.float().sum() * 0)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = self.make_optimizer(self.parameters())
        if self.make_scheduler is None:
            return optimizer
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": self.make_scheduler(optimizer), "interval": "step"},
        }


class InfiniteGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return torch.full_like(gradient, float("inf"))


def weights(module: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


def same_weights(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
