"""The features that are hooks, parameters and optimizers: functions of a host that return what is to be the same."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW

from lightning_mp.compat.lightning import callbacks
from support.features import HIDDEN, Host, Net, feature

# ---------------------------------------------------------------------- gradients, as hooks see them


class _ClipsItself(Net):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.seen["norm"] = float(nn.utils.clip_grad_norm_(self.parameters(), 0.05))


@feature
def clips_in_a_hook(host: Host) -> dict[str, Any]:
    module = _ClipsItself()
    return host.fit(module) | {"norm": module.seen.get("norm")}


class _Changes(Net):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(3.0)


@feature
def changes_before_the_step(host: Host) -> dict[str, Any]:
    return host.fit(_Changes())


class _Poisons(Net):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        last = self.global_rank == self.trainer.world_size - 1
        for parameter in self.parameters():  # under FSDP1 and 2 this rank has a shard of some
            if parameter.grad is not None and last and self.trainer.global_step == 2:
                parameter.grad.fill_(float("inf"))


@feature
def poisons_before_the_step(host: Host) -> dict[str, Any]:
    return host.fit(_Poisons())


class _LooksAtNorms(Net):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        from lightning.pytorch.utilities import grad_norm

        self.seen["norms"] = {name: float(norm) for name, norm in grad_norm(self, norm_type=2).items()}


@feature
def logs_grad_norm(host: Host) -> dict[str, Any]:
    module = _LooksAtNorms()
    return host.fit(module) | {"norms": module.seen["norms"]}


class _TiesByHand(Net):
    def on_train_batch_end(self, *rest: Any) -> None:
        with torch.no_grad():
            self.head.weight.clamp_(-0.1, 0.1)  # weight clipping, as of a WGAN's critic


@feature
def clamps_weights_after_the_step(host: Host) -> dict[str, Any]:
    return host.fit(_TiesByHand())


@feature
def clips_by_norm(host: Host) -> dict[str, Any]:
    return host.fit(Net(), gradient_clip_val=0.05)


@feature
def clips_by_value(host: Host) -> dict[str, Any]:
    return host.fit(Net(), gradient_clip_val=0.01, gradient_clip_algorithm="value")


@feature
def accumulates(host: Host) -> dict[str, Any]:
    return host.fit(Net(), accumulate_grad_batches=3, gradient_clip_val=0.05)


@feature
def accumulates_on_a_schedule(host: Host) -> dict[str, Any]:
    schedule = callbacks.GradientAccumulationScheduler({0: 1, 1: 3})
    return host.fit(Net(), callbacks=[schedule], max_epochs=2)


# ---------------------------------------------------------------------- which parameters are used


class _Unused(Net):
    def __init__(self) -> None:
        super().__init__()
        self.never = nn.Linear(HIDDEN, HIDDEN)


@feature
def a_layer_is_never_used(host: Host) -> dict[str, Any]:
    return host.fit(_Unused(), strategy_options={"ddp": {"find_unused_parameters": True}})


class _OneRank(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        losses = []
        world, rank = self.trainer.world_size, self.global_rank
        for part in range(2):
            if world == 1 or part == rank:
                x, y = (t.chunk(2)[part] for t in batch)
                hidden = self.backbone(x)
                hidden = self.middle(hidden) if part else hidden
                losses.append((self.head(hidden).float() - y).pow(2).mean())
        return sum(losses) / len(losses)


@feature
def a_layer_is_used_on_one_rank(host: Host) -> dict[str, Any]:
    return host.fit(_OneRank(), strategy_options={"ddp": {"find_unused_parameters": True}})


@feature
def backbone_finetuning(host: Host) -> dict[str, Any]:
    callback = callbacks.BackboneFinetuning(unfreeze_backbone_at_epoch=1, backbone_initial_lr=1e-3)
    return host.fit(Net(), callbacks=[callback], max_epochs=3)


class _Frozen(Net):
    def __init__(self) -> None:
        super().__init__()
        self.backbone.requires_grad_(False)


@feature
def a_frozen_backbone(host: Host) -> dict[str, Any]:
    return host.fit(_Frozen())


class _UnfreezesByHand(_Frozen):
    def configure_optimizers(self) -> Any:
        return AdamW(self.parameters(), lr=1e-2, eps=1e-2)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 4:
            self.backbone.requires_grad_(True)


@feature
def unfreezes_by_hand(host: Host) -> dict[str, Any]:
    return host.fit(_UnfreezesByHand())


class _FreezesByHand(Net):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 4:
            self.backbone.requires_grad_(False)


@feature
def freezes_by_hand(host: Host) -> dict[str, Any]:
    return host.fit(_FreezesByHand(), strategy_options={"ddp": {"find_unused_parameters": True}})


# ---------------------------------------------------------------------- modules and pins


class _Tied(Net):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Linear(HIDDEN, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.table(self.middle(self.backbone(x)))
        return self.head(nn.functional.linear(hidden, self.table.weight))


@feature
def a_pinned_weight_is_read_from_outside(host: Host) -> dict[str, Any]:
    options = {"ddp": {"find_unused_parameters": True}}
    return host.fit(_Tied(), plan_options={"pins": {"table": "fp32"}}, strategy_options=options)


class _Normed(Net):
    def __init__(self, half: bool = False) -> None:
        super().__init__()
        self.middle = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.BatchNorm1d(HIDDEN, affine=False), nn.GELU())
        if half:
            self.half()

    def mine(self, batch: Any) -> Any:
        return [t.to(next(self.parameters()).dtype) if self.half_input else t for t in batch]  # whole, on every rank

    half_input = False


@feature
def batch_norm(host: Host) -> dict[str, Any]:
    return host.fit(_Normed())


# ---------------------------------------------------------------------- optimizers


class _Manual(Net):
    automatic_optimization = False

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.automatic_optimization = False

    def gradients(self, batch: Any, optimizer: Any) -> None:
        self.manual_backward(self.loss(batch))
        self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="norm")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.gradients(batch, optimizer)
        optimizer.step()


@feature
def manual_optimization(host: Host) -> dict[str, Any]:
    return host.fit(_Manual())


class _ManualAccumulation(_Manual):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        self.manual_backward(self.loss(batch) / 2)
        if batch_idx % 2:
            optimizer.step()
            optimizer.zero_grad()


@feature
def manual_accumulation(host: Host) -> dict[str, Any]:
    return host.fit(_ManualAccumulation())


class _ManualBare(_Manual):
    def gradients(self, batch: Any, optimizer: Any) -> None:
        self.loss(batch).backward()


@feature
def manual_bare_backward(host: Host) -> dict[str, Any]:
    return host.fit(_ManualBare())


class _Two(_Manual):
    def configure_optimizers(self) -> Any:
        first = AdamW([*self.backbone.parameters(), *self.middle.parameters()], lr=1e-2, eps=1e-2)
        return [first, SGD(self.head.parameters(), lr=1e-2)]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizers = self.optimizers()
        for optimizer in optimizers:
            optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        for optimizer in optimizers:
            optimizer.step()


@feature
def two_optimizers(host: Host) -> dict[str, Any]:
    return host.fit(_Two())
