"""What lies on this rank: the local part of parameters, gradients and optimizer state under any strategy."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from lightning_mp.compat.lightning import Trainer
from lightning_mp.modules.patterns import plain_name
from lightning_mp.modules.remote import is_remote

DTYPE_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64"}


def dtype_name(dtype: torch.dtype) -> str:
    return DTYPE_NAMES.get(dtype, str(dtype))


def local(tensor: Tensor) -> Tensor:
    """The part of a parameter, gradient or state tensor that this rank stores."""
    shard = getattr(tensor, "ds_tensor", None)  # ZeRO-3: the parameter itself is empty between uses
    if shard is not None:
        return shard
    tensor = tensor.detach()
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def parameters(module: nn.Module) -> dict[str, Tensor]:
    """Name → the local part, of what is not on another stage of a pipeline."""
    return {name: local(parameter) for name, parameter in _here(module)}


def _here(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return ((plain_name(name), one) for name, one in module.named_parameters() if not is_remote(one))


def stored(module: nn.Module) -> dict[str, str]:
    return {name: dtype_name(parameter.dtype) for name, parameter in _here(module)}


def trained(module: nn.Module) -> dict[str, Tensor]:
    return {name: local(one).clone() for name, one in _here(module)}


def gradients(module: nn.Module) -> dict[str, Tensor]:
    return {plain_name(n): local(p.grad) for n, p in module.named_parameters() if p.grad is not None}


def base_optimizer(optimizer: Any) -> Any:
    while not isinstance(optimizer, torch.optim.Optimizer) or hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer


def moments(optimizer: Any) -> list[dict[str, Tensor]]:
    """A mapping a stepped parameter, in the optimizer's order: exp_avg, exp_avg_sq, step."""
    inner = base_optimizer(optimizer)
    members = [parameter for group in inner.param_groups for parameter in group["params"]]
    # ZeRO-3 fills the groups for the length of a step only
    states = [inner.state.get(parameter, {}) for parameter in members or list(inner.state)]
    return [dict(part for kv in sorted(state.items()) for part in _stored(*kv)) for state in states]


def _stored(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    """A state tensor's local part; of a quantized one, what it is made of."""
    if isinstance(value, Tensor):
        value = local(value)
        inside = value.__tensor_flatten__()[0] if hasattr(value, "__tensor_flatten__") else []
        yield from ((f"{name}.{part}", bits(getattr(value, part))) for part in inside) if inside else ((name, value),)


def bits(tensor: Tensor) -> Tensor:
    """Numbers of 8 bits as bytes: fp8 travels between processes no other way."""
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor


def floating(states: Iterable[dict[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    for state in states:
        yield from ((key, value) for key, value in state.items() if key != "step")


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the distinct storages below ``tensors``, padding included."""
    storages = {s.data_ptr(): s.nbytes() for t in tensors for s in [t.untyped_storage()] if s.nbytes()}
    return sum(storages.values())


def squares(found: dict[str, Tensor]) -> dict[str, tuple[int, float]]:
    """Name → how many numbers lie here and the sum of their squares: a global norm's parts, without a collective."""
    return {name: (tensor.numel(), tensor.double().pow(2).sum().item()) for name, tensor in found.items()}


# ---------------------------------------------------------------------- where ZeRO keeps it


def zero_optimizer(trainer: Trainer) -> Any:
    return getattr(getattr(trainer.strategy, "deepspeed_engine", None), "optimizer", None)


def zero_masters(trainer: Trainer) -> list[Tensor]:
    """The flat partitions that ZeRO steps, a copy of the parameters' own."""
    zero = zero_optimizer(trainer)
    names = ("single_partition_of_fp32_groups", "fp32_partitioned_groups_flat")  # stages 1 and 2; stage 3
    return [partition for name in names for partition in getattr(zero, name, [])]


def zero_gradients(trainer: Trainer) -> list[Tensor]:
    """The gradient partitions ZeRO holds at the step; none under another strategy."""
    zero = zero_optimizer(trainer)
    groups = getattr(zero, "averaged_gradients", {}).values()  # stages 1 and 2: lists of tensors by group
    flat = getattr(zero, "grad_partitions_flat_buffer", None)  # stage 3
    offloaded = [partition.grad for partition in zero_masters(trainer)]
    held = [*(tensor for group in groups for tensor in group or ()), flat, *offloaded]
    return [tensor for tensor in held if tensor is not None]
