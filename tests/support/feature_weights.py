"""The features that watch or change weights by themselves: tensor hooks, and writing in place."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from support.feature_loops import Metrics
from support.features import HIDDEN, STEPS, Host, Net, data, feature, left


class _Hooked(Net):
    """Hooks from before the run, from its start, from within a step, and one that is taken off again."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.backbone[0].weight.register_hook(lambda gradient: gradient * 3.0)
        self.early = self.middle[0].bias.register_hook(torch.zeros_like)
        self.backbone[0].bias.register_post_accumulate_grad_hook(_tripled)

    def on_train_start(self) -> None:
        self.middle[0].weight.register_hook(lambda gradient: gradient * 0.5)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 2:
            self.head.weight.register_hook(lambda gradient: gradient * 2.0)
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 3:
            self.early.remove()
            self.head.weight.register_hook(lambda gradient: gradient * 5.0)


def _tripled(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(3.0)


@feature
def tensor_hooks_of_every_age(host: Host) -> dict[str, Any]:
    return host.fit(_Hooked(make_optimizer=_sgd))


def _sgd(parameters: Any) -> torch.optim.SGD:
    return torch.optim.SGD(parameters, lr=1e-2)


class _Clamps(Net):
    def on_train_batch_end(self, *rest: Any) -> None:
        self.head.weight.data.clamp_(-0.1, 0.1)


@feature
def clamps_data_after_the_step(host: Host) -> dict[str, Any]:
    return host.fit(_Clamps())


class _ClampsLast(Net):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == STEPS - 1:
            with torch.no_grad():
                self.head.weight.clamp_(-0.1, 0.1)


@feature
def clamps_weights_after_the_last_step(host: Host) -> dict[str, Any]:
    return host.fit(_ClampsLast())


class _ClampsGathered(Net):
    def on_train_batch_end(self, *rest: Any) -> None:
        import deepspeed

        parameters = list(self.head.parameters())
        partitioned = hasattr(parameters[0], "ds_id")
        with deepspeed.zero.GatheredParameters(parameters, modifier_rank=0, enabled=partitioned), torch.no_grad():
            for parameter in parameters:
                parameter.clamp_(-0.1, 0.1)


@feature
def clamps_gathered_weights(host: Host) -> dict[str, Any]:
    return host.fit(_ClampsGathered())


class _Penalized(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch) + 0.1 * sum(parameter.pow(2).sum() for parameter in self.parameters())


@feature
def all_weights_in_the_loss(host: Host) -> dict[str, Any]:
    return host.fit(_Penalized(), strategy_options=_UNITS)


# ---------------------------------------------------------------------- ranks that go different ways


class _Routed(Net):
    """A sum of experts, each a unit; each half of the batch takes its own ``ways``, in that order."""

    experts = "ab"
    ways: tuple[str, str] = ("ab", "ab")
    #: of what each half computed, what it leaves out of its loss
    left_out: tuple[str, str] = ("", "")

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.middle.requires_grad_(False)
        for way in self.experts:
            self.add_module(way, nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.Tanh()))

    def half(self, batch: Any, part: int) -> Tensor:
        x, y = (tensor.chunk(2)[part] for tensor in batch)
        hidden = out = self.backbone(x)
        for way in self.ways[part]:
            expert = getattr(self, way)(hidden)
            out = out if way in self.left_out[part] else out + expert
        return (self.head(out).float() - y).pow(2).mean()

    def loss(self, batch: Any) -> Tensor:
        halves = range(2) if self.trainer.world_size == 1 else [self.global_rank]
        return torch.stack([self.half(batch, part) for part in halves]).mean()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)


class _RoutedByHand(_Routed):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()


_UNITS = {
    "ddp": {"find_unused_parameters": True},
    "fsdp2": {"wrap": "Sequential"},
    "deepspeed_zero3": {"config": {"zero_optimization": {"stage3_param_persistence_threshold": 0}}},
}


def _routed(host: Host, *ways: str, kind: type[_Routed] = _Routed, **options: Any) -> dict[str, Any]:
    module = kind(ways=ways, left_out=options.pop("left_out", ("", "")))
    return host.fit(module, strategy_options=_UNITS, **options)


@feature
def ranks_use_the_same_units(host: Host) -> dict[str, Any]:
    return _routed(host, "ab", "ab")


@feature
def a_unit_is_used_on_one_rank(host: Host) -> dict[str, Any]:
    return _routed(host, "a", "ab")


class _Logs(_Routed):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("train_loss", loss.detach(), sync_dist=True)
        self.log("twice", 2 * loss.detach(), sync_dist=True)
        return loss


@feature
def a_unit_is_used_on_one_rank_that_logs(host: Host) -> dict[str, Any]:
    return _routed(host, "a", "ab", kind=_Logs)


@feature
def ranks_use_different_units(host: Host) -> dict[str, Any]:
    return _routed(host, "a", "b")


@feature
def ranks_run_units_in_opposite_orders(host: Host) -> dict[str, Any]:
    return _routed(host, "ab", "ba")


@feature
def a_unit_is_left_out_of_one_loss(host: Host) -> dict[str, Any]:
    return _routed(host, "ab", "ab", left_out=("b", ""))


@feature
def a_unit_is_used_on_one_rank_by_hand(host: Host) -> dict[str, Any]:
    return _routed(host, "a", "ab", kind=_RoutedByHand)


@feature
def ranks_use_the_same_units_by_hand(host: Host) -> dict[str, Any]:
    return _routed(host, "ab", "ab", kind=_RoutedByHand)


class _Recomputed(_Routed):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.region = _Region(self.a, self.b)
        del self.a, self.b

    def half(self, batch: Any, part: int) -> Tensor:
        x, y = (tensor.chunk(2)[part] for tensor in batch)
        return (self.head(self.region(self.backbone(x), self.ways[part])).float() - y).pow(2).mean()


class _Region(nn.Module):
    def __init__(self, a: nn.Module, b: nn.Module) -> None:
        super().__init__()
        self.a, self.b = a, b

    def forward(self, x: Tensor, way: str) -> Tensor:
        for name in way:
            x = x + getattr(self, name)(x)
        return x


@feature
def a_unit_is_used_on_one_rank_in_a_recomputed_region(host: Host) -> dict[str, Any]:
    return _routed(host, "a", "ab", kind=_Recomputed, plan_options={"checkpointing": "_Region"})


@feature
def ranks_use_the_same_units_in_a_recomputed_region(host: Host) -> dict[str, Any]:
    return _routed(host, "ab", "ab", kind=_Recomputed, plan_options={"checkpointing": "_Region"})


@feature
def a_unit_is_used_on_one_rank_to_validate(host: Host) -> dict[str, Any]:
    module, keep = _Validates(ways=("a", "ab")), Metrics()
    trainer = host.trainer(callbacks=[keep], val_check_interval=4, strategy_options=_UNITS)
    trainer.fit(module, data(), data(2))
    return left(trainer, module) | {"metrics": keep.found}


class _Validates(_Routed):
    def half(self, batch: Any, part: int) -> Tensor:
        given = self.ways
        self.ways = ("ab", "ab") if self.training else given
        loss = super().half(batch, part)
        self.ways = given
        return loss
