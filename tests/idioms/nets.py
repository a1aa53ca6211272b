"""The small modules that idioms change a part of."""

from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional

from idioms.host import WIDTH


class Block(nn.Module):
    """A residual block."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


class Net(nn.Module):
    """Two blocks and a head."""

    def __init__(self, width: int = WIDTH, outputs: int = 1) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.head = nn.Linear(width, outputs)

    def features(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))


class Base(LightningModule):
    """A regression that SGD trains; ``seen`` is what an idiom noted, to be compared."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = Net()
        self.seen: dict[str, Any] = {}

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return functional.mse_loss(self(x).float(), y.float())

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def note(self, name: str, value: Any) -> None:
        """Append what the idiom read."""
        self.seen.setdefault(name, []).append(float(value))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


class ByHand(Base):
    """Manual optimization; an idiom overrides ``training_step``."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
