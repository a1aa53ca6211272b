"""Whether a model that its user sharded with ``fully_shard`` still means what the plan says."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from lightning_mp.compat import torch_sharding as sharding_compat
from lightning_mp.errors import Faults
from lightning_mp.modules.pins import PinMap
from lightning_mp.numerics.dtypes import TORCH_DTYPES, to_torch
from lightning_mp.policy import PrecisionPolicy

_INSTEAD = "use strategy='mp_fsdp2' without configure_model, which shards after the plan is applied"


def check_users_sharding(
    module: nn.Module, policy: PrecisionPolicy, pin_map: PinMap, faults: Faults, *, replicas: int = 1
) -> None:
    """Note what ``configure_model``, or a run before, decided otherwise than the plan.

    ``replicas`` is how many ranks have data of their own: between them every gradient has to be summed.
    """
    _check_storage(module, policy, pin_map, faults)
    whole = [name for name, parameter in module.named_parameters() if _left_whole(parameter)]
    if whole and replicas > 1:
        faults.add(
            f"{len(whole)} trained parameters that configure_model leaves whole, such as {whole[0]!r}, on {replicas} "
            "data-parallel ranks",
            "fully_shard around every trained parameter: nothing else reduces gradients under this strategy",
            f"shard the module they are in too, or {_INSTEAD}",
        )
    reduce_dtype = to_torch(policy.reduce_dtype)
    for name, mixed, own in _policies(module):
        if mixed.param_dtype is not None:
            faults.add(
                f"fully_shard on {name!r} with MixedPrecisionPolicy(param_dtype={mixed.param_dtype})",
                "no param_dtype: the plan's autocast and pins decide what each module computes in",
                f"remove param_dtype, or {_INSTEAD}",
            )
        # Without one, torch sums in the dtype that is gathered.
        if (mixed.reduce_dtype or mixed.param_dtype or own) != reduce_dtype:
            faults.add(
                f"fully_shard on {name!r} with MixedPrecisionPolicy(reduce_dtype={mixed.reduce_dtype}) beside the "
                f"plan's reduce_dtype={policy.reduce_dtype!r}",
                "gradients summed in the plan's reduce_dtype",
                f"write MixedPrecisionPolicy(reduce_dtype={reduce_dtype}), or {_INSTEAD}",
            )


def _left_whole(parameter: nn.Parameter) -> bool:
    return parameter.requires_grad and not hasattr(parameter.data, "to_local")


def _check_storage(module: nn.Module, policy: PrecisionPolicy, pin_map: PinMap, faults: Faults) -> None:
    """A sharded parameter can no longer be cast: it has to be stored as declared already."""
    pinned = pin_map.dtypes()
    wrong: list[tuple[str, torch.dtype, str]] = []
    for name, parameter in module.named_parameters():
        wanted = pinned.get(id(parameter), policy.storage_dtype)
        sharded = hasattr(parameter.data, "to_local")
        cast = parameter.dtype in TORCH_DTYPES.values() or (parameter.dtype == torch.float64 and wanted != "fp32")
        if sharded and cast and parameter.dtype != to_torch(wanted):
            wrong.append((name, parameter.dtype, wanted))
    if wrong:
        name, dtype, wanted = wrong[0]
        faults.add(
            f"{len(wrong)} parameters sharded already, such as {name!r} in {dtype}, where the plan stores {wanted}",
            "parameters that are stored as the plan says before configure_model, or a run before, shards them",
            f"{_INSTEAD}; after a run under another plan, make a new module",
        )


def _policies(module: nn.Module) -> Iterator[tuple[str, Any, torch.dtype]]:
    """Each unit's name and policy, and the dtype its trainable parameters are stored in."""
    for name, submodule in module.named_modules():
        if not isinstance(submodule, FSDPModule):
            continue
        held = map(sharding_compat.shard_of, sharding_compat.fsdp2_parameters(submodule))
        stored = next((parameter.dtype for parameter in held if parameter.requires_grad), None)
        if stored is not None:
            yield name, sharding_compat.fsdp2_policy(submodule), stored
