"""Turn a prepared model into an FSDP2 model: the same weights on every rank, compiled blocks, then shards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_mp.compat.torch import saved_buffers
from lightning_mp.compat.torch_sharding import make_root
from lightning_mp.numerics.dtypes import to_torch
from lightning_mp.policy import PrecisionPolicy
from lightning_mp.strategies import meta_device
from lightning_mp.strategies.shard_units import Units


@dataclass(frozen=True, slots=True)
class Sharding:
    """How a model is sharded; ``fully_shard``'s own keywords are in ``options``."""

    compile: bool = False
    cpu_offload: bool = False
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])


def is_sharded(model: nn.Module) -> bool:
    """Whether ``fully_shard`` was applied to any part of ``model``."""
    return any(isinstance(module, FSDPModule) for module in model.modules())


def broadcast_from_first(model: nn.Module, device: torch.device) -> None:
    """Give every rank the parameters and buffers of rank 0, one at a time, as DistributedDataParallel does."""
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.device.type != "meta" and not hasattr(tensor, "to_local"):
            _broadcast_(tensor, device)


def _broadcast_(tensor: Tensor, device: torch.device, group: dist.ProcessGroup | None = None) -> None:
    there = tensor.detach().to(device).contiguous()
    # bytes travel as such: gloo knows no float8
    dist.broadcast(there.view(torch.uint8) if there.itemsize == 1 else there, group=group, group_src=0)
    tensor.data.copy_(there)


def share_buffers(model: nn.Module, device: torch.device, group: dist.ProcessGroup | None = None) -> None:
    """Broadcast the first rank's saved buffers (a batch norm's statistics), which each rank updates by itself."""
    for tensor in saved_buffers(model):
        if not isinstance(tensor, DTensor):
            _broadcast_(tensor, device, group)


def shard(
    model: nn.Module, units: Units, mesh: DeviceMesh, device: torch.device, policy: PrecisionPolicy, how: Sharding
) -> None:
    """Shard ``model`` in place over ``mesh``, of which this process has ``device``, unit by unit, inner ones first.

    No ``param_dtype``: it would change what norms and embeddings run in, and a step would no longer be that of DDP.
    """
    offload = CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu") if how.cpu_offload else OffloadPolicy()
    options: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(reduce_dtype=to_torch(policy.reduce_dtype), cast_forward_inputs=False),
        "offload_policy": offload,
        **how.options,
    }
    place = torch.device("cpu") if how.cpu_offload else device
    if how.compile:
        for block in units.blocks:
            block.compile()
    for unit in units.inner:
        meta_device.materialize(unit, model, place, device)
        fully_shard(unit, **options)
    meta_device.materialize(model, model, place, device)
    # The root's forward is the whole step, after which backward begins at once: nothing is to be freed in between, and
    # where the step calls self(x), what comes after that call still needs the root's weights.
    options.pop("reshard_after_forward", None)
    fully_shard(model, **options)
    make_root(model)  # a block that is called before a step must not become one


def full_optimizer_state(optimizer: Optimizer, *, keep: bool) -> dict[str, Any]:
    """``optimizer.state_dict()`` with full tensors on the CPU; every rank calls it, those that ``keep`` get it."""
    content = optimizer.state_dict()
    state = {
        number: {key: whole_on_cpu(value, keep=keep) for key, value in values.items()}
        for number, values in content["state"].items()
    }
    return {**content, "state": state} if keep else {}


def whole_on_cpu(value: Any, *, keep: bool = True) -> Any:
    """A tensor on the CPU, joined if it is sharded, which all ranks do; nothing of it unless ``keep``."""
    if isinstance(value, DTensor):
        value = value.full_tensor()
    if not isinstance(value, Tensor):
        return value
    return value.detach().cpu() if keep else None
