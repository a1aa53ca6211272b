"""Gradients: unscale and check them in one pass, their norm, whole or in shards, and a step that a flag holds back."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from operator import itemgetter
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from lightning_mp.compat import torch as compat
from lightning_mp.numerics.dtypes import HALF

HostRead = Callable[[Tensor], bool]
#: process groups over which a gradient's shards add up to all of it
Groups = tuple[dist.ProcessGroup, ...]


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """Every parameter the optimizer updates."""
    groups: list[dict[str, Any]] = optimizer.param_groups
    return list(chain.from_iterable(map(itemgetter("params"), groups)))


def drop(optimizer: Optimizer) -> None:
    """Take every gradient away: torch's optimizers change nothing without one."""
    for parameter in parameters_of(optimizer):
        parameter.grad = None


def gradients(parameters: Iterable[Tensor]) -> list[Tensor]:
    """The gradients that are there, dense ones as they are, sparse ones as their (coalesced) values."""
    found: list[Tensor] = []
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is None:
            continue
        if gradient.layout is not torch.strided:
            # Entries of one index add up when coalesced, which may overflow: so that must come before the check.
            parameter.grad = gradient.coalesce()
            gradient = parameter.grad.values()
        if hasattr(gradient, "to_local"):
            gradient = local(gradient)
        found.append(torch.view_as_real(gradient) if gradient.is_complex() else gradient)
    return found


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of a DTensor, in the same storage; any other tensor itself."""
    if not hasattr(tensor, "to_local"):
        return tensor
    with torch.no_grad():  # else to_local() would be recorded, and hand out a view
        return cast("Any", tensor).to_local()


def unscale_and_check_(grads: Iterable[Tensor], inv_scale: Tensor, found_inf: Tensor) -> None:
    """Multiply ``grads`` by ``inv_scale`` in place and set ``found_inf`` to 1 where any was not finite.

    ``inv_scale`` and ``found_inf`` are fp32 scalars on one device; nothing is read back. With ``inv_scale`` 1 the
    gradients keep their bits. One multi-tensor kernel a device and dtype: the one behind ``torch.amp.GradScaler``.
    """
    for members in _by_device_and_dtype(grads):
        device = members[0].device
        here = device == found_inf.device
        flag = found_inf if here else torch.zeros_like(found_inf, device=device)
        inverse = inv_scale if here else inv_scale.to(device)
        if members[0].dtype is torch.bfloat16 and device.type != "cpu":
            _unscale_and_check_by_norm_(members, inverse, flag)
        else:
            compat.unscale_and_check_(members, flag, inverse)
        if not here:
            found_inf.copy_(torch.maximum(found_inf, flag.to(found_inf.device)))


def _unscale_and_check_by_norm_(members: list[Tensor], inv_scale: Tensor, found_inf: Tensor) -> None:
    """The same for bf16, which torch's kernel does not take on CUDA (pytorch/pytorch issue 127176).

    The largest magnitude of a tensor is finite exactly where all of it is.
    """
    largest = torch.stack([norm.float() for norm in compat.norms(members, math.inf)])
    found_inf.copy_(torch.maximum(found_inf, (~torch.isfinite(largest)).any().to(found_inf.dtype)))
    for member in members:
        member.mul_(inv_scale)


def _by_device_and_dtype(grads: Iterable[Tensor]) -> Iterable[list[Tensor]]:
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for gradient in grads:
        groups.setdefault((gradient.device, gradient.dtype), []).append(gradient)
    return groups.values()


def clip_grad_norm_(parameters: Iterable[Tensor], max_norm: float) -> Tensor:
    """Clip by the global 2-norm, computed in fp32 whatever the gradients' dtypes; the norm before, on the device.

    For fp32 gradients this is ``torch.nn.utils.clip_grad_norm_``, bit for bit. A norm of fp16 gradients taken in fp16
    would overflow at 65,504.
    """
    members = [parameter for parameter in parameters if parameter.grad is not None]
    if {parameter.dtype for parameter in members}.isdisjoint(HALF):
        return torch.nn.utils.clip_grad_norm_(members, max_norm)
    grads = [cast("Tensor", parameter.grad) for parameter in members]
    total = torch.linalg.vector_norm(_norms(grads, grads[0].device))
    torch.nn.utils.clip_grads_with_norm_(members, max_norm, total)
    return total


# ------------------------------------------------------------------ shards


def shard_groups(gradient: Tensor, plain: Groups) -> Groups:
    """The process groups ``gradient`` is split over; ``plain`` for a plain tensor, which has no placements."""
    if not hasattr(gradient, "to_local"):
        return plain
    sharded = cast("Any", gradient)
    dimensions = enumerate(sharded.placements)
    # a split may also be a strided one (FSDP over tensor parallel), which does not call itself a Shard
    return tuple(sharded.device_mesh.get_group(index) for index, kind in dimensions if not kind.is_replicate())


def sum_partial_(parameters: Iterable[Tensor]) -> None:
    """Sum gradients over ranks that are still partial, as tensor parallelism leaves some."""
    for parameter in parameters:
        gradient = cast("Any", parameter.grad)
        if gradient is None or not hasattr(gradient, "to_local"):
            continue
        if any(kind.is_partial() for kind in gradient.placements):
            parameter.grad = gradient.redistribute(gradient.device_mesh, cast("Any", parameter).placements)


def global_norm(parameters: Iterable[Tensor], device: torch.device, plain: Groups = ()) -> Tensor:
    """The 2-norm over every parameter's gradient, wherever its shards are: an fp32 scalar on ``device``.

    One pass over the local shards and one all-reduce for each set of process groups (one, without tensor parallel).
    ``plain`` are the groups over which gradients that are no DTensors are split, as FSDP1's are.
    """
    sums: dict[Groups, Tensor] = {}
    for groups, members in _by_groups(parameters, plain).items():
        sums[groups] = squares(gradients(members), device).sum()
        for group in groups:
            dist.all_reduce(sums[groups], group=group)
    total = sum(sums.values(), torch.zeros((), dtype=torch.float32, device=device))
    return total.sqrt()


def over_shards(norm: Tensor, order: float, groups: Groups, *, error_if_nonfinite: bool = False) -> Tensor:
    """The norm of all shards from that of this rank's, ``norm``.

    Raises:
        RuntimeError: it is not finite, under ``error_if_nonfinite``; as ``clip_grad_norm_`` does.
    """
    largest = math.isinf(order)
    total = norm.clone() if largest else norm.pow(order)
    for group in groups:
        dist.all_reduce(total, op=dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM, group=group)
    total = total if largest else total.pow(1.0 / order)
    if error_if_nonfinite and not torch.isfinite(total):
        raise RuntimeError(f"The total norm of order {order} for gradients is non-finite, so it cannot be clipped.")
    return total


def _by_groups(parameters: Iterable[Tensor], plain: Groups) -> dict[Groups, list[Tensor]]:
    """Parameters with a gradient by the process groups it is split over, in an order that is the same on all ranks.

    A rank without a shard (of a parameter smaller than the world) takes part in the sum all the same.
    """
    found: dict[Groups, list[Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            found.setdefault(shard_groups(parameter.grad, plain), []).append(parameter)
        elif plain:
            found.setdefault(plain, [])
    return found


def squares(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """The sum of squares of each tensor, in fp32 whatever its dtype: (len(tensors),) on ``device``."""
    if not tensors:
        return torch.zeros(0, dtype=torch.float32, device=device)
    return _norms(tensors, device).square()


def _norms(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    # A norm of half-precision numbers taken in half precision would overflow, or stop growing.
    norms = [torch.zeros((), dtype=torch.float32, device=device)] * len(tensors)
    for dtype, places in _by_dtype(tensors).items():
        members = [tensors[place] for place in places]
        for place, norm in zip(places, compat.norms(members, 2, torch.float32 if dtype in HALF else None), strict=True):
            norms[place] = norm.to(device, torch.float32)
    return torch.stack(norms)


def _by_dtype(tensors: Iterable[Tensor]) -> dict[torch.dtype, list[int]]:
    """Where in ``tensors`` those of each dtype are."""
    found: dict[torch.dtype, list[int]] = {}
    for place, tensor in enumerate(tensors):
        if tensor.numel():  # a rank may hold nothing of a small parameter
            found.setdefault(tensor.dtype, []).append(place)
    return found


def clip_to_(parameters: Iterable[Tensor], max_norm: float, total: Tensor) -> None:
    """Scale every gradient so that the global norm ``total`` becomes at most ``max_norm``, without a device sync.

    One multi-tensor kernel a device and dtype.
    """
    # torch.nn.utils.clip_grads_with_norm_'s rule, its constant included
    factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for members in _by_device_and_dtype(gradients(parameters)):
        compat.multiply_(members, factor.to(members[0].device))


# ------------------------------------------------------------------ the step


def step_unless(optimizer: Optimizer, found_inf: Tensor, read: HostRead, **kwargs: Any) -> Any:
    """Step the optimizer where ``found_inf`` is 0; where it is 1, leave every parameter and all state as they were.

    A fused optimizer takes the flag on the device. Any other has to be asked for on the host: ``read(found_inf)``.
    Returns what the optimizer returned, ``None`` where it was not called.
    """
    if not compat.takes_flag(optimizer) or _makes_momentum(optimizer):
        return None if read(found_inf) else optimizer.step(**kwargs)
    flagged = cast("Any", optimizer)
    flagged.grad_scale, flagged.found_inf = None, found_inf
    try:
        return optimizer.step(**kwargs)
    finally:
        del flagged.grad_scale, flagged.found_inf


def _makes_momentum(optimizer: Optimizer) -> bool:
    # torch (2.13 still) allocates fused SGD's momentum uninitialised and returns before writing it when the very first
    # step is held back: the garbage is then used as momentum. So that step is decided on the host.
    return isinstance(optimizer, torch.optim.SGD) and any(
        group["momentum"] and optimizer.state[parameter].get("momentum_buffer") is None
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.grad is not None
    )
