"""Optimizers that are replaced or wrapped while a fit runs, as published callbacks and modules do it."""

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.core.optimizer import LightningOptimizer


class Averaging(torch.optim.Optimizer):
    """Keeps an average of the weights beside an optimizer, and answers for it, as NeMo's ``EMAOptimizer`` does."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.average: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["optimizer"], name)

    def step(self, closure: Callable[[], Any] | None = None, grad_scaler: Any = None, **_: Any) -> Any:
        loss = self.optimizer.step(closure)
        now = [parameter.detach().clone() for group in self.param_groups for parameter in group["params"]]
        self.average = [old.lerp(new, 0.5) for old, new in zip(self.average or now, now, strict=True)]
        return loss


def _like(optimizer: Any) -> Any:
    """A new optimizer over the same parameters."""
    groups = [{**group, "params": list(group["params"])} for group in optimizer.param_groups]
    kind = type(optimizer.optimizer if isinstance(optimizer, Averaging) else optimizer)
    return kind(groups, lr=1e-2)


def _set_up(trainer: Trainer) -> None:
    trainer.strategy.setup_optimizers(trainer)


def _assign(trainer: Trainer) -> None:
    trainer.optimizers = [*map(_like, trainer.optimizers)]


def _average(trainer: Trainer) -> None:
    trainer.optimizers = [Averaging(each) for each in trainer.optimizers if not isinstance(each, Averaging)]


def _hand_back(trainer: Trainer) -> None:
    """Lightning's own wrappers, as ``self.optimizers()`` gives them."""
    kept = trainer.lightning_module.optimizers()
    trainer.optimizers = list(kept) if isinstance(kept, list) else [kept]
    assert all(isinstance(each, LightningOptimizer) for each in trainer.optimizers)


def _clear(trainer: Trainer) -> None:
    trainer.optimizers.clear()
    trainer.strategy.setup_optimizers(trainer)


#: what is done, and in which hook
REPLACED: dict[str, tuple[Callable[[Trainer], None], str]] = {
    "set up each epoch": (_set_up, "on_train_epoch_start"),
    "assigned at the start": (_assign, "on_train_start"),
    "assigned in each step": (_assign, "on_before_zero_grad"),
    "assigned after backward": (_assign, "on_after_backward"),
    "an average around each": (_average, "on_fit_start"),
    "Lightning's wrappers": (_hand_back, "on_train_start"),
    "cleared and set up": (_clear, "on_train_batch_start"),
}


class Replaces(Callback):
    """Does to the Trainer's optimizers what the entry of the table says; a name of the table is a case."""

    def __init__(self, how: str) -> None:
        self._replace, hook = REPLACED[how]
        setattr(self, hook, self._do)

    def _do(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        self._replace(trainer)
