"""Gathers in the compute dtype what autocast alone computes with; shards, gradients and sums stay fp32.

FSDP2's own ``param_dtype`` casts all a unit has, norms and embeddings too, and adds the gradients of a weight that is
used twice in half precision. Set for single parameters, with an ``AutocastWeight`` around what was gathered, every
number is the one that autocast makes of fp32 weights; and autocast keeps no copy of them until the backward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from lightning_mp.compat import torch_sharding as sharding_compat
from lightning_mp.modules.half_weights import Weight
from lightning_mp.numerics.autocast_weight import AutocastWeight


class HalfGathers:
    """Of those ``weights`` of ``root`` that have no reason against it, until ``release``."""

    def __init__(self, root: nn.Module, weights: Sequence[Weight], dtype: torch.dtype) -> None:
        units = [module for module in root.modules() if isinstance(module, FSDPModule)]
        self._groups = [group for unit in units for group in sharding_compat.fsdp2_groups(unit)]
        names = {
            (id(module), key): weight.name
            for weight in weights
            if weight.reason is None
            for module, key in weight.places
        }
        for group in self._groups:
            sharding_compat.shard_again(group)
            for parameter in group.fsdp_params:
                module, key = sharding_compat.places_of(parameter)[0]
                name = names.get((id(module), key))
                if name is None or parameter.sharded_param.dtype != torch.float32:
                    sharding_compat.gather_as_stored(parameter)
                else:
                    sharding_compat.gather_as(parameter, dtype, partial(AutocastWeight, label=name))

    def release(self) -> None:
        """Gather what is stored again: the module is its user's."""
        for group in self._groups:
            sharding_compat.shard_again(group)
            for parameter in group.fsdp_params:
                sharding_compat.gather_as_stored(parameter)
        self._groups = []
