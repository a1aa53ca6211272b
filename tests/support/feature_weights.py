"""The features that watch or change weights by themselves: tensor hooks, and writing in place."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from support.features import HIDDEN, Host, Net, feature


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


@feature
def ranks_use_different_units(host: Host) -> dict[str, Any]:
    return _routed(host, "a", "b")


@feature
def ranks_run_units_in_opposite_orders(host: Host) -> dict[str, Any]:
    return _routed(host, "ab", "ba")
