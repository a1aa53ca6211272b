"""The features that are hooks, parameters and optimizers: functions of a host that return what is to be the same."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW

from lightning_mp.compat.lightning import callbacks
from support.features import HIDDEN, Host, Net, feature
from support.manual import by_closure

# ---------------------------------------------------------------------- gradients, as hooks see them


class _ClipsItself(Net):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.seen["norm"] = float(nn.utils.clip_grad_norm_(self.parameters(), 0.05))


@feature
def clips_in_a_hook(host: Host) -> dict[str, Any]:
    module = _ClipsItself()
    return host.fit(module) | {"norm": module.seen.get("norm")}


class _ClipsByHook(Net):
    def configure_gradient_clipping(self, optimizer: Any, *rest: Any, **kw: Any) -> None:
        nn.utils.clip_grad_norm_(self.parameters(), 0.05)


@feature
def clips_in_configure_gradient_clipping(host: Host) -> dict[str, Any]:
    return host.fit(_ClipsByHook(), gradient_clip_val=1.0)


class _ClipsByLightning(Net):
    def configure_gradient_clipping(self, optimizer: Any, *rest: Any, **kw: Any) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="norm")


@feature
def clips_by_clip_gradients(host: Host) -> dict[str, Any]:
    return host.fit(_ClipsByLightning())


class _Changes(Net):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(3.0)


@feature
def changes_before_the_step(host: Host) -> dict[str, Any]:
    return host.fit(_Changes())


class _ChangesAfterBackward(Net):
    def on_after_backward(self) -> None:
        for parameter in self.head.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(3.0)


@feature
def changes_after_backward(host: Host) -> dict[str, Any]:
    return host.fit(_ChangesAfterBackward())


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


class _ParameterHook(Net):
    def configure_optimizers(self) -> Any:
        self.head.weight.register_hook(lambda gradient: gradient * 3.0)
        return super().configure_optimizers()


@feature
def tensor_hook_on_a_parameter(host: Host) -> dict[str, Any]:
    return host.fit(_ParameterHook())


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


class _Sometimes(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = self.mine(batch)
        hidden = self.backbone(x)
        if batch_idx % 2:
            hidden = self.middle(hidden)
        return (self.head(hidden).float() - y).pow(2).mean()


@feature
def a_layer_is_used_every_other_step(host: Host) -> dict[str, Any]:
    return host.fit(_Sometimes(), strategy_options={"ddp": {"find_unused_parameters": True}})


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


class _Unfreezes(callbacks.BaseFinetuning):
    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.backbone)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.backbone, optimizer, lr=1e-2)


@feature
def unfreezes_in_the_midst(host: Host) -> dict[str, Any]:
    return host.fit(Net(), callbacks=[_Unfreezes()], max_epochs=3, num_sanity_val_steps=0)


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
def a_weight_is_used_twice(host: Host) -> dict[str, Any]:
    return host.fit(_Tied(), strategy_options={"ddp": {"find_unused_parameters": True}})


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


@feature
def batch_norm_of_half_weights(host: Host) -> dict[str, Any]:
    return host.fit(_Normed(half=True))


@feature
def batch_norm_recomputed(host: Host) -> dict[str, Any]:
    return host.fit(_Normed(), plan_options={"checkpointing": "middle"})


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


class _ManualClips(_Manual):
    def gradients(self, batch: Any, optimizer: Any) -> None:
        self.manual_backward(self.loss(batch))
        nn.utils.clip_grad_norm_(self.parameters(), 0.05)


@feature
def manual_clips_itself(host: Host) -> dict[str, Any]:
    return host.fit(_ManualClips())


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


class _ManualClosure(_Manual):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        by_closure(self, batch)


@feature
def manual_closure(host: Host) -> dict[str, Any]:
    return host.fit(_ManualClosure())


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
