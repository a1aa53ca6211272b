"""The dtypes that parameters and buffers are stored in where no pin says otherwise."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from lightning_mp.numerics.dtypes import cast_module_, castable, left_alone, to_torch
from lightning_mp.policy import PrecisionPolicy


def cast(modules: Iterable[nn.Module], policy: PrecisionPolicy) -> None:
    """Cast what each of ``modules`` owns, in place, to what ``policy`` stores.

    Buffers follow half-precision parameters, and those that become fp32 here (the statistics of a batch norm that was
    made half); any other stays what the user made it. So do quantized weights and all that belongs to them, and float64
    where the policy stores fp32.
    """
    found, storage = list(modules), to_torch(policy.storage_dtype)
    buffers = policy.buffer_dtype or (policy.storage_dtype if policy.storage_dtype != "fp32" else None)
    moved = {one.dtype for module in found for one in castable(module, buffers=False) if not _keeps(one, storage)}
    for module in found:
        cast_module_(module, storage, buffers=False, only=moved)
        if buffers is not None:
            cast_module_(module, to_torch(buffers), parameters=False)
        else:
            cast_module_(module, storage, parameters=False, only=moved)


def kept_dtypes(root: nn.Module, storage: torch.dtype) -> dict[int, torch.dtype]:
    """``id`` of every parameter that is not cast to ``storage`` where no pin covers it → its own dtype."""
    return {
        id(one): one.dtype
        for module in root.modules()
        for left in [left_alone(module)]
        for one in module.parameters(recurse=False)
        if id(one) in left or (_keeps(one, storage) and not hasattr(one, "to_local"))
    }


def _keeps(tensor: Tensor, storage: torch.dtype) -> bool:
    return tensor.dtype == torch.float64 and storage == torch.float32
