"""What this rank holds of parameters and gradients, and over which process groups the parts add up to the whole."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_mp.compat import deepspeed as compat
from lightning_mp.numerics.grad_norm import Groups, shard_groups
from lightning_mp.numerics.grads import gradients, local


class Part(NamedTuple):
    """A part of a tensor (empty where this rank has none) and the process groups the tensor is split over."""

    tensor: Tensor
    groups: Groups


@dataclass(frozen=True, slots=True)
class Layout:
    """Where parameters and gradients lie: whole, in DTensors, in FSDP1's views, and where ``zero`` in ZeRO's parts.

    To be asked under ``torch.no_grad()``.

    ``whole`` are the groups over which *plain* tensors are split, as FSDP1's are; ZeRO splits over all ranks.
    """

    whole: Groups = ()
    zero: bool = False

    def parameter(self, parameter: Tensor) -> Part:
        """What is held of ``parameter``."""
        if self.zero and compat.is_partitioned(parameter):
            return Part(compat.local_part(parameter), _everyone())
        part = local(parameter)
        return Part(torch.view_as_real(part) if part.is_complex() else part, shard_groups(parameter, self.whole))

    def gradient(self, parameter: Tensor) -> Part:
        """What is held of its gradient, with the same groups on every rank whether or not there is one."""
        if parameter.grad is None:
            part = compat.local_gradient(parameter) if self.zero else None
            if part is not None:
                return Part(part, _everyone())
            return Part(parameter.new_empty(0), shard_groups(parameter, self.whole))
        gradient = cast("Any", parameter.grad)
        if hasattr(gradient, "to_local") and any(kind.is_partial() for kind in gradient.placements):
            # still to be summed over ranks: tensor parallel leaves such
            gradient = gradient.redistribute(gradient.device_mesh, cast("Any", parameter).placements)
            return Part(local(gradient), shard_groups(gradient, self.whole))
        return Part(gradients([parameter])[0], shard_groups(gradient, self.whole))


def _everyone() -> Groups:
    group = dist.group.WORLD if dist.is_initialized() else None
    return () if group is None or group.size() == 1 else (group,)
