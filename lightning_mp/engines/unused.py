"""Parameters that a step did not use on some rank (a mixture of experts): the gradients DDP would leave, under FSDP2.

FSDP2 reduces, of each unit, the parameters that have a gradient on this rank: ranks that used different ones add up
different ones. Here a unit reduces all it has, with zeros for what the rank did not use; and what no rank used has no
gradient afterwards, as under DDP's ``find_unused_parameters``, so that no optimizer moves it.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from lightning_mp.compat import torch_sharding as sharding_compat
from lightning_mp.engines import reduce
from lightning_mp.engines.same_order import ranks_apart
from lightning_mp.errors import PlanError


class UnusedParameters:
    """Watches the units of ``model``, until ``release``.

    A backward pass costs one all-reduce of a flag a parameter. Reading it is a device sync, made only where a gradient
    was missing on this rank, as DDP does.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._device = device
        groups = sharding_compat.groups_below(model)
        self._uses = [sharding_compat.Uses(group, partial(self._complete, group)) for group in groups]
        self._members = [member for group in groups for member in sharding_compat.members_of(group)]
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._names = [names.get(id(sharding_compat.shard_of(member)), "") for member in self._members]
        #: by ``id``, what had a gradient on this rank, what had none since the step before either, and what is in a
        #: unit that did not run
        self._used, self._missed, self._skipped = set[int](), set[int](), set[int]()
        #: what had one in earlier passes that are not summed over replicas yet, if there are any
        self._before: set[int] | None = None
        self._reduced = False

    def release(self) -> None:
        """Let go of the units."""
        for uses in self._uses:
            uses.release()
        self._uses, self._members = [], []

    def _complete(self, group: Any, last: bool) -> None:
        """Before a unit's gradients are reduced: zeros where this rank has none."""
        self._reduced = True
        members = [member for member in sharding_compat.members_of(group) if self._trained(member)]
        missing = [member for member in members if not sharding_compat.has_unsharded_gradient(member)]
        self._used |= {id(member) for member in members} - {id(member) for member in missing}
        if len(missing) == len(members):
            if not last:  # of a unit that ran twice, all gradients come with the first forward
                return
            if not sharding_compat.in_backward_pass(group):
                self._skipped |= set(map(id, members))
                if not sharding_compat.holds_sums_of_shards(group):
                    return
        for member in missing:
            if sharding_compat.shard_of(member).grad is None:
                self._missed.add(id(member))
            sharding_compat.zero_unsharded_gradient(member)

    @staticmethod
    def _trained(member: Any) -> bool:
        return sharding_compat.shard_of(member).requires_grad

    def finish_backward(self) -> None:
        """After a backward pass: take the gradient away from parameters that no rank used in the window.

        Raises:
            PlanError: this rank did not run a unit that another one ran, whose weights were then mistaken for others.
        """
        for uses in self._uses:
            uses.reset()
        if not self._reduced:
            return
        rows = [self._used] if self._before is None else [self._used, self._used | self._before]
        flags = torch.tensor([[id(one) in used for one in self._members] for used in rows], dtype=torch.uint8)
        # From pinned memory, so that nothing waits for the device.
        there = (flags.pin_memory() if self._device.type == "cuda" else flags).to(self._device, non_blocking=True)
        reduce.max_over_ranks_(there)
        absent = self._skipped - self._used
        if self._missed or absent:
            by_row = there.tolist()
            for member, name, used, in_window in zip(self._members, self._names, by_row[0], by_row[-1], strict=True):
                if used and id(member) in absent:
                    raise PlanError([ranks_apart(f"the unit of {name!r}, which ran on some ranks only")])
                if not in_window and id(member) in self._missed:
                    sharding_compat.shard_of(member).grad = None
        self._before = None if all(uses.ends_window() for uses in self._uses) else rows[-1]
        self._used, self._missed, self._skipped, self._reduced = set(), set(), set(), False
