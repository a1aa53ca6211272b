"""The shards of parameters and gradients on this rank, and the process groups over which they are sharded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor

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
    ZeRO shards over all ranks.
    """

    whole: Groups = ()
    zero: bool = False

    def parameter(self, parameter: Tensor) -> Shard:
        """This rank's shard of ``parameter``."""
        if self.zero and hasattr(parameter, "ds_tensor"):
            return Shard(_unpadded(parameter, cast("Any", parameter).ds_tensor), _everyone())
        shard = local(parameter)
        return Shard(torch.view_as_real(shard) if shard.is_complex() else shard, shard_groups(parameter, self.whole))

    def gradient(self, parameter: Tensor) -> Shard:
        """This rank's shard of its gradient, with the same groups on every rank whether or not there is one."""
        if parameter.grad is None:
            shard = _zero_gradient(parameter) if self.zero else None
            if shard is not None:
                return Shard(shard, _everyone())
            return Shard(parameter.new_empty(0), shard_groups(parameter, self.whole))
        gradient = cast("Any", parameter.grad)
        if hasattr(gradient, "to_local") and any(kind.is_partial() for kind in gradient.placements):
            # still to be summed over ranks: tensor parallel leaves such
            gradient = gradient.redistribute(gradient.device_mesh, cast("Any", parameter).placements)
            return Shard(local(gradient), shard_groups(gradient, self.whole))
        return Shard(gradients([parameter])[0], shard_groups(gradient, self.whole))


def _everyone() -> Groups:
    group = dist.group.WORLD if dist.is_initialized() else None
    return () if group is None or group.size() == 1 else (group,)


def _unpadded(parameter: Any, shard: Tensor) -> Tensor:
    """Stage 3 splits a parameter into equal shards, of which the last ones hold nothing behind its end."""
    flat = shard.detach().reshape(-1)
    rank = dist.get_rank(parameter.ds_process_group)
    return flat[: max(0, parameter.ds_numel - rank * flat.numel())]


def _zero_gradient(parameter: Any) -> Tensor | None:
    """ZeRO's shard of a gradient between the backward pass and its step, multiplied by the loss scale as it is."""
    if hasattr(parameter, "ds_tensor"):
        get: Callable[[Any], Tensor | None] = parameter._z3_optimizer.get_local_fp32_grad_for_param
        gradient = get(parameter)
        return None if gradient is None else _unpadded(parameter, gradient)
    if not hasattr(parameter, "_hp_mapping"):
        return None
    fragment = parameter._hp_mapping
    if fragment is None:  # all of it lies on other ranks
        return parameter.new_empty(0)
    gradient = fragment.get_lp_grad_fragment(parameter._index_in_param_group).detach().reshape(-1)
    place = fragment.lp_fragment_address
    return gradient.narrow(0, place.start, place.numel) if gradient.numel() == parameter.numel() else gradient
