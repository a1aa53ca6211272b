"""The global norm of sharded gradients, and clipping by it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_mp.compat import torch as compat
from lightning_mp.numerics.grads import gradients, local

#: process groups over which a gradient's shards add up to all of it
Groups = tuple[dist.ProcessGroup, ...]


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
    squares: dict[Groups, Tensor] = {}
    for groups, members in _by_groups(parameters, plain).items():
        squares[groups] = _sum_of_squares(members, device)
        for group in groups:
            dist.all_reduce(squares[groups], group=group)
    total = sum(squares.values(), torch.zeros((), dtype=torch.float32, device=device))
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


def _sum_of_squares(parameters: Sequence[Tensor], device: torch.device) -> Tensor:
    return squares(gradients(parameters), device).sum()


def squares(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """The sum of squares of each tensor, in fp32 whatever its dtype: (len(tensors),) on ``device``."""
    if not tensors:
        return torch.zeros(0, dtype=torch.float32, device=device)
    norms = [torch.zeros((), dtype=torch.float32, device=device)] * len(tensors)
    for dtype, places in _by_dtype(tensors).items():
        for place, norm in zip(places, _norms([tensors[place] for place in places], dtype), strict=True):
            norms[place] = norm if norm.device == device else norm.to(device)
    return torch.stack(norms).square()


def _norms(members: list[Tensor], dtype: torch.dtype) -> Sequence[Tensor]:
    # A norm of half-precision numbers taken in half precision would overflow, or stop growing.
    if dtype == torch.float64:
        return [norm.float() for norm in compat.norms(members, 2)]
    return compat.norms(members, 2, torch.float32)


def _by_dtype(tensors: Iterable[Tensor]) -> dict[torch.dtype, list[int]]:
    """Where in ``tensors`` those of each dtype are."""
    found: dict[torch.dtype, list[int]] = {}
    for place, tensor in enumerate(tensors):
        if tensor.numel():  # a rank may hold nothing of a small parameter
            found.setdefault(tensor.dtype, []).append(place)
    return found


def clip_to_(parameters: Iterable[Tensor], max_norm: float, total: Tensor) -> None:
    """Scale every gradient so that the global norm ``total`` becomes at most ``max_norm``, without a device sync."""
    # torch.nn.utils.clip_grads_with_norm_'s rule, its constant included
    factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for parameter in parameters:
        if parameter.grad is not None:
            shard = local(parameter.grad)
            shard.mul_(factor.to(shard.device))
