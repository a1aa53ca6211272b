"""Turn a prepared model into an FSDP2 model: the same weights on every rank, compiled blocks, then shards."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from lightning_mp.numerics.dtypes import to_torch
from lightning_mp.numerics.shard_units import Units
from lightning_mp.policy import PrecisionPolicy


@dataclass(frozen=True, slots=True)
class Sharding:
    """How a model is sharded; ``fully_shard``'s own keywords are in ``options``."""

    compile: bool = False
    prefetch: int | None = None
    cpu_offload: bool = False
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])


def is_sharded(model: nn.Module) -> bool:
    """Whether ``fully_shard`` was applied to any part of ``model``."""
    return any(isinstance(module, FSDPModule) for module in model.modules())


def broadcast_from_first(model: nn.Module, device: torch.device) -> None:
    """Give every rank the parameters and buffers of rank 0, one at a time, as DistributedDataParallel does."""
    seen: set[int] = set()
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.device.type == "meta" or id(tensor) in seen or hasattr(tensor, "to_local"):
            continue
        seen.add(id(tensor))
        there = tensor.detach().to(device).contiguous()
        dist.broadcast(there, src=0)
        tensor.data.copy_(there)


def shard(model: nn.Module, units: Units, mesh: DeviceMesh, policy: PrecisionPolicy, how: Sharding) -> None:
    """Shard ``model`` in place, unit by unit, inner ones first.

    The dtype of storage is also what is gathered, and autocast computes: ``param_dtype`` would change what norms and
    embeddings run in, and a step would no longer be that of DDP.
    """
    offload = CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu") if how.cpu_offload else OffloadPolicy()
    options: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(reduce_dtype=to_torch(policy.reduce_dtype), cast_forward_inputs=False),
        "offload_policy": offload,
        **how.options,
    }
    device = torch.device("cpu") if how.cpu_offload else _device_of(mesh)
    if how.compile:
        for block in units.blocks:
            block.compile()
    for unit in (*units.inner, model):
        _materialize(unit, model, device)
        if unit is model:
            _tie_again(model)
        fully_shard(unit, **options)
    if how.prefetch:
        _prefetch(units.blocks, how.prefetch)


def _device_of(mesh: DeviceMesh) -> torch.device:
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.get_device_module(mesh.device_type).current_device())  # pyright: ignore[reportUnknownArgumentType]


def _prefetch(blocks: Sequence[nn.Module], depth: int) -> None:
    """Gather the next ``depth`` blocks while one computes, forward and backward."""
    members = cast("Sequence[FSDPModule]", blocks)
    for index, block in enumerate(members):
        block.set_modules_to_forward_prefetch(list(members[index + 1 : index + 1 + depth]))
        block.set_modules_to_backward_prefetch(list(reversed(members[max(0, index - depth) : index])))


# ------------------------------------------------------------------ models on the meta device


def _materialize(unit: nn.Module, root: nn.Module, device: torch.device) -> None:
    """Make and initialise what ``unit`` has on the meta device; only one unit is whole at a time."""
    waiting = [module for module in unit.modules() if _on_meta(module)]
    for module in waiting:
        module.to_empty(device=device, recurse=False)
        _initialise(module, root)
    for module in waiting:
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            there = tensor.detach() if tensor.device.type != "cpu" or device.type == "cpu" else tensor.to(device)
            dist.broadcast(there, src=0)


def _on_meta(module: nn.Module) -> bool:
    tensors: Iterable[Tensor] = (*module.parameters(recurse=False), *module.buffers(recurse=False))
    return any(tensor.is_meta for tensor in tensors)


def _initialise(module: nn.Module, root: nn.Module) -> None:
    """Initialise one module by its own ``reset_parameters``, or as its transformers model does."""
    reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    pretrained = _pretrained_around(module, root)
    with torch.no_grad():
        if pretrained is not None:
            _initialise_as_transformers(cast("Any", pretrained), module)
        elif callable(reset):
            reset()


def _initialise_as_transformers(pretrained: Any, module: nn.Module) -> None:
    pretrained._init_weights(module)


def _pretrained_around(module: nn.Module, root: nn.Module) -> nn.Module | None:
    for candidate in root.modules():
        if hasattr(candidate, "_init_weights") and any(inner is module for inner in candidate.modules()):
            return candidate
    return None


def cannot_initialise(model: nn.Module) -> list[str]:
    """Names of modules on the meta device that nothing says how to initialise."""
    return [
        name
        for name, module in model.named_modules()
        if _on_meta(module)
        and not hasattr(module, "reset_parameters")
        and not hasattr(module, "_reset_parameters")
        and _pretrained_around(module, model) is None
    ]


def _tie_again(model: nn.Module) -> None:
    """Making tensors anew unties them; transformers models know their ties."""
    for module in model.modules():
        if hasattr(module, "tie_weights") and hasattr(module, "_init_weights"):
            cast("Any", module).tie_weights()
