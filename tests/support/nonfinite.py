"""A module that breaks in a chosen way on chosen batches, and Lightning's stock precisions to break it under."""

import random
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset

from support.models import FEATURES, HIDDEN, InfiniteGradient, Regression, batches

STOCK = ("32-true", "bf16-mixed", "16-mixed", "bf16-true")
BAD = 3
#: how it breaks -> the module and the pass in which that is seen, and whether the loss is bad already
FAULTS: dict[str, tuple[str, str, bool]] = {
    "weight": ("net.1", "forward", True), "batch": ("net.0", "forward", True), "loss": ("net.4", "loss", True),
    "infinite loss": ("net.4", "loss", True), "gradient": ("net.2", "backward", False),
}  # fmt: skip


class Spoils(nn.Module):
    """Multiplies by one; its backward hands on infinite gradients while it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(1))  # FSDP2 takes no scalars
        self.bad = False

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.gain
        return InfiniteGradient.apply(x) if self.bad else x


class Breaks(Regression):
    """Five layers that break in the way ``how`` on the batches ``bad`` of the first epoch, on ``guilty`` alone."""

    def __init__(self, how: str, bad: tuple[int, ...] = (BAD,), optimizer: Any = None, guilty: int = 0) -> None:
        super().__init__(optimizer or partial(torch.optim.AdamW, lr=1e-3, eps=1e-4, weight_decay=0.3))
        self.net.insert(2, Spoils())
        self.how, self.bad, self.guilty = how, bad, guilty

    def breaks_on(self, batch_idx: int) -> bool:
        return batch_idx in self.bad and self.current_epoch == 0 and self.global_rank == self.guilty

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        breaks = self.breaks_on(batch_idx)
        self.net[2].bad = breaks and self.how == "gradient"
        if breaks and self.how == "weight":
            with torch.no_grad():
                self.net[1].weight.view(-1)[3] = float("nan")
        if breaks and self.how == "batch":
            batch = (batch[0].index_fill(1, torch.tensor([2]), float("nan")), batch[1])
        loss = super().training_step(batch, batch_idx)
        if breaks and self.how == "loss":
            return loss * float("nan")
        return loss + float("inf") if breaks and self.how == "infinite loss" else loss


class Remembers(Breaks):
    """The same with everything a replay could leave a trace in: dropout, batch statistics, logs, counters, metrics."""

    def __init__(self, how: str, bad: tuple[int, ...] = (BAD,), **options: Any) -> None:
        from torchmetrics import MeanMetric

        super().__init__(how, bad, **options)
        self.net[0] = nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.BatchNorm1d(HIDDEN), nn.Dropout(0.3))
        self.net[0].apply(_draw_alike)
        self.mean, self.steps, self.drawn = MeanMetric(), 0, list[float]()
        self.average = torch.zeros(())

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.steps += 1
        self.drawn.append(random.random() + np.random.random() + torch.rand(()).item())
        self.average.add_(1)
        loss = super().training_step(batch, batch_idx)
        self.mean.update(loss.detach().nan_to_num(posinf=0))
        self.log("loss", loss.detach().nan_to_num(posinf=0), on_step=True, on_epoch=True)
        self.log_dict({"steps": float(self.steps)})
        return loss


@torch.no_grad()
def _draw_alike(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        module.weight.copy_(torch.linspace(-0.2, 0.2, module.weight.numel()).view_as(module.weight))
        module.bias.zero_()


def without(*bad: int, rows: int = 64) -> DataLoader[Any]:
    """``support.models.batches()`` less some batches."""
    kept = [row for row in range(rows) if row // 8 not in bad]
    return DataLoader(Subset(batches(rows).dataset, kept), batch_size=8)
