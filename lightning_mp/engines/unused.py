"""Parameters that a step did not use on some rank (a mixture of experts): the gradients DDP would leave, under FSDP2.

FSDP2 reduces, of each unit, the parameters that have a gradient on this rank: ranks that used different ones add up
different ones. Here a unit reduces all it has, with zeros for what the rank did not use; and what no rank used has no
gradient afterwards, as under DDP's ``find_unused_parameters``, so that no optimizer moves it.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_mp.compat import torch_sharding as sharding_compat
from lightning_mp.engines import reduce


class UnusedParameters:
    """Watches the units of ``model``, until ``release``.

    A backward pass costs one all-reduce of a flag a parameter. The host reads it only where a gradient was missing on
    this rank, as DDP does.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._device = device
        groups = sharding_compat.groups_below(model)
        self._undo = [sharding_compat.before_reduction(group, partial(self._complete, group)) for group in groups]
        self._members: list[Any] = [member for group in groups for member in group.fsdp_params]
        #: by ``id``, what had a gradient on this rank, and what had none since the step before either
        self._used: set[int] = set()
        self._missed: set[int] = set()
        self._reduced = False

    def release(self) -> None:
        """Let go of the units."""
        for undo in self._undo:
            undo()
        self._undo, self._members = [], []

    def _complete(self, group: Any) -> None:
        """Before a unit's gradients are reduced: zeros where this rank has none."""
        self._reduced = True
        members = [member for member in group.fsdp_params if member.sharded_param.requires_grad]
        missing = [member for member in members if not sharding_compat.has_unsharded_gradient(member)]
        self._used |= {id(member) for member in members} - {id(member) for member in missing}
        if len(missing) == len(members) and not sharding_compat.in_backward_pass(group):
            return  # it took no part in this pass
        for member in missing:
            if member.sharded_param.grad is None:
                self._missed.add(id(member))
            member.unsharded_param.grad = torch.zeros_like(member.unsharded_param)

    def settle(self) -> None:
        """After a backward pass: take the gradient away from parameters that no rank used."""
        if not self._reduced:
            return
        flags = self._flags()
        reduce.max_over_ranks_(flags)
        if self._missed:
            for member, used in zip(self._members, flags.tolist(), strict=True):
                if id(member) in self._missed and not used:
                    member.sharded_param.grad = None
        self._used, self._missed, self._reduced = set(), set(), False

    def _flags(self) -> Tensor:
        flags = [id(member) in self._used for member in self._members]
        there = torch.tensor(flags, dtype=torch.uint8, pin_memory=self._device.type == "cuda")
        return there.to(self._device, non_blocking=True)  # from pinned memory: the host does not wait
