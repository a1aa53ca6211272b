"""Updates that half-precision weights round away: how many weights that a step was to move stayed as they were."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_mp.engines.optimizer_facts import keeps_small_updates
from lightning_mp.monitor.health.norms import SquareSums, some
from lightning_mp.monitor.health.shards import Layout
from lightning_mp.numerics.dtypes import HALF
from lightning_mp.numerics.grad_norm import Groups

LOST, MOVED = "lost", "moved"


class LostUpdates:
    """Of one step: the half-precision weights with a gradient, as they were before it, and which of them stayed.

    A weight whose gradient is 0, or its learning rate, has no update to lose and is not counted. Of a parameter with
    many elements the pieces are looked at that the update ratio takes. Under ZeRO, whose gradients are not where its
    weights are, nothing is counted.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._steps: list[tuple[Groups, list[Tensor], Tensor, Tensor]] = []

    def before_step(self, optimizer: Optimizer, parameters: Mapping[str, Tensor]) -> None:
        """Copy those of ``parameters``, which ``optimizer`` is about to move, that are stored in half precision."""
        if self._layout.zero or keeps_small_updates(optimizer):
            return
        still = {id(p) for group in optimizer.param_groups if _is_zero(group["lr"]) for p in group["params"]}
        kinds: dict[tuple[Groups, torch.dtype, torch.device, int], list[tuple[Tensor, Tensor]]] = {}
        for parameter in parameters.values():
            if parameter.dtype in HALF and id(parameter) not in still:
                (weight, groups), gradient = self._layout.parameter(parameter), self._layout.gradient(parameter).tensor
                kept, whole = some(weight), gradient.numel() == weight.numel()
                moves = some(gradient) != 0 if whole else torch.zeros_like(kept, dtype=torch.bool)
                kinds.setdefault((groups, weight.dtype, weight.device, kept.dim()), []).append((parameter, moves))
        for (groups, *_), found in kinds.items():
            moved = [parameter for parameter, _ in found]
            self._steps.append((groups, moved, self._now(moved), torch.cat([moves for _, moves in found])))

    def after_step(self, sums: SquareSums) -> None:
        """Add to ``sums`` how many of them were to move, and how many did not."""
        for groups, parameters, before, moves in self._steps:
            stayed = (self._now(parameters) == before) & moves
            sums.add_counts(groups, {LOST: stayed.sum(), MOVED: moves.sum()})
        self._steps = []

    def _now(self, parameters: list[Tensor]) -> Tensor:
        return torch.cat([some(self._layout.parameter(parameter).tensor) for parameter in parameters])


def _is_zero(lr: object) -> bool:
    return isinstance(lr, float | int) and lr == 0  # a rate on the device is not read; Adafactor may have none
