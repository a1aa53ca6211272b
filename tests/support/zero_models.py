"""LightningModules for runs under DeepSpeed, and what they are trained with."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import LambdaLR, LinearLR, OneCycleLR, SequentialLR

from lightning_mp import LossScaling
from support import hf, sharded
from support.models import FEATURES, HIDDEN, InfiniteGradient
from support.sharded import BAD_RANK, Ranked

OPTIMIZERS = {**sharded.OPTIMIZERS, "sgd": partial(SGD, lr=1e-2, momentum=0.9)}
RULES = {
    "deepspeed": LossScaling.deepspeed(initial_scale_power=3, loss_scale_window=2, hysteresis=2, at_min="hold"),
    "floor": LossScaling.deepspeed(initial_scale_power=1, loss_scale_window=2, hysteresis=1, at_min="hold"),
    "raise": LossScaling.deepspeed(initial_scale_power=1, loss_scale_window=2, hysteresis=1),
    "counters": LossScaling(init_scale=256.0, growth_interval=3, hysteresis=2),
    "grows": LossScaling(init_scale=8.0, growth_interval=2),
}


class Small(Ranked):
    """With an AdamW that is not fused, unless told otherwise; on rank ``BAD_RANK`` a weight's gradient overflows.

    ZeRO-3 hands on another tensor than a module's output, so that the last module could not be told from its parent.
    """

    def __init__(self, bad: tuple[int, ...] = (), optimizer: str = "adamw") -> None:
        super().__init__()
        self.make_optimizer, self._overflows = OPTIMIZERS[optimizer], bad

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.overflow_at = self._overflows if self.global_rank == BAD_RANK else ()
        return super().training_step(batch, batch_idx)


class Asked(Small):
    """Notes in what context every kind of step ran."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, tuple[bool, torch.dtype, torch.dtype]] = {}
        self.losses_of: list[float] = []

    def _ask(self, step: str, batch: Any) -> None:
        state = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), torch.get_default_dtype()
        self.seen[step] = state
        self.losses_of.append(float(self.loss(batch)))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self._ask("training", batch)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self._ask("validation", batch)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self._ask("test", batch)

    def predict_step(self, batch: Any, batch_idx: int) -> None:
        self._ask("predict", batch)


class ByHand(Small):
    """Manual optimization; notes whether backward ran under autocast."""

    def __init__(self, clip: float | None, backwards: int) -> None:
        super().__init__(optimizer="sgd")
        self.automatic_optimization = False
        self.clip, self.backwards = clip, backwards
        self.under_autocast: set[bool] = set()

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        for _ in range(self.backwards):
            loss = self.loss(batch)
            loss.register_hook(lambda _: self.under_autocast.add(torch.is_autocast_enabled("cpu")))
            self.manual_backward(loss)
        if self.clip is not None:
            self.clip_gradients(optimizer, self.clip, "norm")
        optimizer.step()


class Window(Small):
    """One micro-batch in the middle of the first window overflows on rank 1; the first of two epochs ends in one."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if (self.trainer.max_epochs, self.current_epoch, batch_idx) == (2, 0, 7) else None

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        if self.global_rank == 1 and batch_idx == 1:
            loss = loss + InfiniteGradient.apply(self.net[3].bias.float().sum() * 0)
        return loss


def _two(first: int, second: int) -> list[Any]:
    return [lambda n: 1 / (first + n), lambda n: 1 / (second + n)]


SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "lambda": lambda o: LambdaLR(o, _two(1, 2)),
    "onecycle": lambda o: OneCycleLR(o, max_lr=[0.1, 0.05], total_steps=12),  # two phases, as many as groups
    "sequential": lambda o: SequentialLR(o, [LambdaLR(o, _two(1, 2)), LinearLR(o)], [3]),
}


class Groups(Small):
    """Two param groups, the first of which a pin splits, and a schedule with an entry a group."""

    def __init__(self, schedule: str, bad: tuple[int, ...] = ()) -> None:
        super().__init__(bad)
        self.schedule = schedule

    def configure_optimizers(self) -> Any:
        first = [*self.net[0].parameters(), *self.net[1].parameters()]
        groups = [{"params": first, "lr": 1e-2}, {"params": list(self.net[3].parameters()), "lr": 2e-3}]
        optimizer = AdamW(groups, eps=1e-4)
        schedule = {"scheduler": SCHEDULES[self.schedule](optimizer), "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": schedule}


class Language(LightningModule):
    """A tiny Llama under LoRA; forward hooks note what its norms ran in."""

    def __init__(self, lora: bool) -> None:
        super().__init__()
        self.model = hf.llama(lora=lora)
        self.losses: list[float] = []
        self.norms: set[tuple[torch.dtype, ...]] = set()
        for name, module in self.model.named_modules():
            if "norm" in name:
                module.register_forward_hook(self._note)

    def _note(self, module: nn.Module, inputs: Any, output: Tensor) -> None:
        self.norms.add((module.weight.dtype, output.dtype))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = hf.loss_of(self.model, hf.tokens(2 + self.global_rank))
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        return AdamW(self.parameters(), lr=1e-2, eps=1e-4)  # frozen ones too, as many write it


class Later(Small):
    """Makes its net in ``configure_model``; ``frozen`` freezes the first layer."""

    def __init__(self, frozen: bool) -> None:
        super().__init__()
        self.net, self.frozen = None, frozen

    def configure_model(self) -> None:
        if self.net is None:
            torch.manual_seed(0)
            layers = nn.Linear(FEATURES, HIDDEN), nn.LayerNorm(HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 1)
            self.net = nn.Sequential(*layers)
            self.net[0].requires_grad_(not self.frozen)
