"""The dtypes that parameters and buffers are stored in where no pin says otherwise."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from lightning_mp.numerics.dtypes import cast_module_, is_plain, to_torch
from lightning_mp.policy import PrecisionPolicy


def cast(modules: Iterable[nn.Module], policy: PrecisionPolicy) -> None:
    """Cast what each of ``modules`` owns, in place, to what ``policy`` stores.

    Buffers follow half-precision parameters, and those that become fp32 here (the statistics of a batch norm that was
    made half); any other stays what the user made it.
    """
    found, storage = list(modules), to_torch(policy.storage_dtype)
    buffers = policy.buffer_dtype or (policy.storage_dtype if policy.storage_dtype != "fp32" else None)
    owned = (tensor for module in found for tensor in module.parameters(recurse=False))
    moved = {tensor.dtype for tensor in owned if is_plain(tensor)}
    for module in found:
        cast_module_(module, storage, buffers=False)
        if buffers is not None:
            cast_module_(module, to_torch(buffers), parameters=False)
        else:
            cast_module_(module, storage, parameters=False, only=moved)
