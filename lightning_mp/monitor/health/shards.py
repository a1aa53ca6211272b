"""The shards of parameters and gradients on this rank, and the process groups over which they are sharded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_mp.compat import deepspeed as compat
from lightning_mp.modules.half_copies import HalfCopy
from lightning_mp.modules.remote import is_remote
from lightning_mp.numerics.grad_norm import Groups, shard_groups
from lightning_mp.numerics.grads import gradients, local


class Shard(NamedTuple):
    """A shard of a tensor (empty where this rank has none) and the process groups the tensor is split over."""

    tensor: Tensor
    groups: Groups


@dataclass(frozen=True, slots=True)
class Layout:
    """How parameters and gradients are stored: whole, as DTensors, as FSDP1's views, or with ``zero`` as ZeRO's shards.

    Call it under ``torch.no_grad()``. ``whole`` are the groups over which *plain* tensors are sharded, as FSDP1's are;
    ZeRO shards over all ranks. ``over`` are the groups of every tensor where that is the same for all, as for the
    stages of a pipeline.
    """

    whole: Groups = ()
    zero: bool = False
    over: Groups = ()

    def _groups(self, tensor: Tensor) -> Groups:
        return self.over or shard_groups(tensor, self.whole)

    def parameter(self, parameter: Tensor) -> Shard:
        """This rank's shard of ``parameter``."""
        if self.zero and compat.is_partitioned(parameter):
            return Shard(compat.local_part(parameter), _everyone())
        if isinstance(parameter, HalfCopy):
            return Shard(compat.master_part(parameter), _everyone())
        if is_remote(parameter):
            return Shard(parameter.new_empty(0), self._groups(parameter))
        shard = local(parameter)
        return Shard(torch.view_as_real(shard) if shard.is_complex() else shard, self._groups(parameter))

    def gradient(self, parameter: Tensor) -> Shard:
        """This rank's shard of its gradient, with the same groups on every rank whether or not there is one."""
        if parameter.grad is None:
            shard = compat.local_gradient(parameter) if self.zero else None
            if shard is not None:
                return Shard(shard, _everyone())
            return Shard(parameter.new_empty(0), self._groups(parameter))
        gradient = cast("Any", parameter.grad)
        if hasattr(gradient, "to_local") and any(kind.is_partial() for kind in gradient.placements):
            # still to be summed over ranks: tensor parallel leaves such
            gradient = gradient.redistribute(gradient.device_mesh, cast("Any", parameter).placements)
            return Shard(local(gradient), self._groups(gradient))
        return Shard(gradients([parameter])[0], self._groups(gradient))


def _everyone() -> Groups:
    group = dist.group.WORLD if dist.is_initialized() else None
    return () if group is None or group.size() == 1 else (group,)
