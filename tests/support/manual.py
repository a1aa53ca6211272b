"""Manual optimization as users write it: each way of stepping is a ``training_step``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from support.models import FEATURES, HIDDEN, InfiniteGradient, Regression


class Manual(Regression):
    """Regression stepped by hand; ``way`` is the ``training_step``, ``true`` the gradients it was shown."""

    def __init__(self, way: Callable[[Manual, Any, int], None] | None = None, optimizer: Any = None) -> None:
        super().__init__(optimizer or (lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True)))
        self.automatic_optimization = False
        self.way = way
        self.true: list[dict[str, Tensor]] = []

    @property
    def user_scaler(self) -> Any:
        return getattr(self.trainer.precision_plugin, "scaler", None)

    def look(self) -> None:
        self.true.append({name: p.grad.detach().clone() for name, p in self.named_parameters() if p.grad is not None})

    def training_step(self, batch: Any, batch_idx: int) -> None:
        assert self.way is not None
        self.way(self, batch, batch_idx)
        self.losses.append(self.loss(batch).item())


def between(what: Callable[[Any, Any], None], name: str = "way") -> Callable[[Any, Any, int], None]:
    """Zero, backward, ``what`` of the module and its optimizer, a look, step."""

    def way(module: Any, batch: Any, batch_idx: int) -> None:
        optimizer = module.optimizers()
        optimizer.zero_grad()
        module.manual_backward(module.loss(batch))
        what(module, optimizer)
        module.look()
        optimizer.step()

    way.__name__ = name
    return way


def in_turn(module: Any, batch: Any, batch_idx: int) -> None:
    for optimizer, loss in zip(module.optimizers(), module.losses_of(batch, batch_idx), strict=True):
        optimizer.zero_grad()
        module.manual_backward(loss)
        optimizer.step()


class Pair(Manual):
    """Two nets with an optimizer each, as in a GAN; ``overflow`` maps a batch to the nets that overflow in it."""

    def __init__(
        self, way: Callable[[Any, Any, int], None], overflow: dict[int, str] | None = None, optimizer: Any = None
    ) -> None:
        super().__init__(way, optimizer)
        self.overflow = overflow or {}
        generator = torch.get_rng_state()
        torch.manual_seed(1)
        self.other = nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 1))
        torch.set_rng_state(generator)

    def spoiled(self, loss: Tensor, which: str, batch_idx: int) -> Tensor:
        """The loss of ``net`` or ``other``, with an infinite gradient where ``overflow`` says so."""
        if which not in self.overflow.get(batch_idx, ""):
            return loss
        weight = (self.net[3] if which == "net" else self.other[2]).weight
        return loss + InfiniteGradient.apply(weight.float().sum() * 0)

    def losses_of(self, batch: Any, batch_idx: int) -> tuple[Tensor, Tensor]:
        x, y = batch
        return (
            self.spoiled(self.loss(batch), "net", batch_idx),
            self.spoiled((self.other(x).float() - y).abs().mean(), "other", batch_idx),
        )

    def configure_optimizers(self) -> Any:
        return [self.make_optimizer(self.net.parameters()), self.make_optimizer(self.other.parameters())]
