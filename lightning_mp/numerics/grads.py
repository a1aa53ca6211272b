"""Gradients: unscale and check them in one pass, their norm, whole or in shards, and a step that a flag holds back."""

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from operator import attrgetter, itemgetter, methodcaller
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from lightning_mp.compat import torch as compat
from lightning_mp.numerics.dtypes import HALF

_DTYPE = attrgetter("dtype")
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
    held: list[Tensor] = []
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
        held.append(torch.view_as_real(gradient) if gradient.is_complex() else gradient)
    return held


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of a DTensor, in the same storage; any other tensor itself."""
    if not hasattr(tensor, "to_local"):
        return tensor
    with torch.no_grad():  # else to_local() would be recorded, and hand out a view
        return cast("Any", tensor).to_local()


def unscale_and_check_(grads: Iterable[Tensor], inv_scale: Tensor, found_inf: Tensor, *, scaled: bool = True) -> None:
    """Multiply ``grads`` by ``inv_scale`` in place and set ``found_inf`` to 1 where any was not finite.

    Both are fp32 scalars on one device; nothing is read back. One multi-tensor kernel a device and dtype: the one
    behind ``torch.amp.GradScaler``. Gradients that are not ``scaled`` keep their bits; ``inv_scale`` is 1 then.
    """
    members = list(grads)
    for device, by_dtype in _places(members).items():
        here = device == found_inf.device
        flag = found_inf if here else torch.zeros_like(found_inf, device=device)
        inverse = inv_scale if here else inv_scale.to(device)
        for dtype, places in by_dtype.items():
            alike = list(map(members.__getitem__, places))
            if dtype is torch.bfloat16 and device.type != "cpu":
                _check_by_norm_(alike, flag)
                if scaled:
                    _multiply_(alike, inverse)
            else:
                compat.unscale_and_check_(alike, flag, inverse)
        if not here:
            found_inf.copy_(torch.maximum(found_inf, flag.to(found_inf.device)))


def _check_by_norm_(members: list[Tensor], found_inf: Tensor) -> None:
    """By the largest magnitude: bf16, which torch's kernel does not take on CUDA (pytorch/pytorch issue 127176)."""
    finite = (torch.stack([*compat.norms(members, math.inf)]) <= torch.finfo(torch.bfloat16).max).all()
    found_inf.masked_fill_(~finite, 1.0)


def _multiply_(members: list[Tensor], factor: Tensor) -> None:
    """In one launch: on CUDA the kernel takes a factor of the members' dtype, else it is one launch for each."""
    compat.multiply_(members, factor if factor.device.type == "cpu" else factor.to(members[0].dtype))


def _places(tensors: Sequence[Tensor]) -> dict[torch.device, dict[torch.dtype, list[int]]]:
    """Where in ``tensors`` those of each device and dtype are, less empty ones: a rank may hold nothing of one."""
    by_device: dict[torch.device, dict[torch.dtype, list[int]]] = {}
    for place, tensor in enumerate(tensors):
        if tensor.numel():
            by_device.setdefault(tensor.device, {}).setdefault(tensor.dtype, []).append(place)
    return by_device


def clip_grad_norm_(parameters: Iterable[Tensor], max_norm: float) -> Tensor:
    """Clip by the global 2-norm, computed in fp32 whatever the gradients' dtypes; the norm before, on the device.

    For fp32 gradients this is ``torch.nn.utils.clip_grad_norm_``, bit for bit; of fp16 ones that would overflow.
    """
    members = [parameter for parameter in parameters if parameter.grad is not None]
    if set(map(_DTYPE, members)).isdisjoint(HALF):
        return torch.nn.utils.clip_grad_norm_(members, max_norm)
    grads = [cast("Tensor", parameter.grad) for parameter in members]
    total = torch.linalg.vector_norm(_norms(grads, grads[0].device))
    torch.nn.utils.clip_grads_with_norm_(members, max_norm, total)
    return total


def shard_groups(gradient: Tensor, plain: Groups) -> Groups:
    """The process groups ``gradient`` is split over; ``plain`` for a plain tensor, which has no placements."""
    if not hasattr(gradient, "to_local"):
        return plain
    sharded, groups = cast("Any", gradient), list[dist.ProcessGroup]()
    for index, kind in enumerate(sharded.placements):
        if not kind.is_replicate():  # a split may also be a strided one, which does not call itself a Shard
            groups.append(sharded.device_mesh.get_group(index))
    return tuple(groups)


def sum_partial_(parameters: Iterable[Tensor]) -> None:
    """Sum gradients over ranks that are still partial, as tensor parallelism leaves some."""
    for parameter in parameters:
        gradient = cast("Any", parameter.grad)
        if hasattr(gradient, "to_local") and any(map(methodcaller("is_partial"), gradient.placements)):
            parameter.grad = gradient.redistribute(gradient.device_mesh, cast("Any", parameter).placements)


def global_norm(parameters: Iterable[Tensor], device: torch.device, plain: Groups = ()) -> Tensor:
    """The 2-norm over every parameter's gradient, wherever its shards are: an fp32 scalar on ``device``.

    One pass over the local shards and one all-reduce for each set of process groups (one, without tensor parallel).
    ``plain`` are the groups over which gradients that are no DTensors are split, as FSDP1's are.
    """
    members: dict[Groups, list[Tensor]] = {}  # in an order that is the same on all ranks
    for parameter in parameters:
        if parameter.grad is not None:
            members.setdefault(shard_groups(parameter.grad, plain), []).append(parameter)
        elif plain:  # without a shard, of a parameter smaller than the world, the rank takes part in the sum
            members.setdefault(plain, [])
    total = torch.zeros((), dtype=torch.float32, device=device)
    for groups, held in members.items():
        part = squares(gradients(held), device).sum()
        for group in groups:
            dist.all_reduce(part, group=group)
        total = total + part
    return total.sqrt()


def over_shards(norm: Tensor, order: float, groups: Groups, *, error_if_nonfinite: bool = False) -> Tensor:
    """The norm of all shards from ``norm``, that of this rank's; raises as ``clip_grad_norm_`` does."""
    largest = math.isinf(order)
    total = norm.clone() if largest else norm.pow(order)
    for group in groups:
        dist.all_reduce(total, op=dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM, group=group)
    total = total if largest else total.pow(1.0 / order)
    if error_if_nonfinite and not torch.isfinite(total):
        raise RuntimeError(f"The total norm of order {order} for gradients is non-finite, so it cannot be clipped.")
    return total


def squares(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """The sum of squares of each tensor, in fp32 whatever its dtype: (len(tensors),) on ``device``."""
    if not tensors:
        return torch.zeros(0, dtype=torch.float32, device=device)
    return _norms(tensors, device).square()


def _norms(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    # A norm of half-precision numbers taken in half precision would overflow, or stop growing.
    norms = [torch.zeros((), dtype=torch.float32, device=device)] * len(tensors)
    for by_dtype in _places(tensors).values():
        alike: list[Tensor] = []
        for dtype, places in by_dtype.items():
            found = compat.norms(
                [tensors[place] for place in places], 2, dtype=torch.float32 if dtype in HALF else None
            )
            alike.append(torch.stack([*found]).to(torch.float32))
        moved = (torch.cat(alike) if len(alike) > 1 else alike[0]).to(device)  # together: a copy from elsewhere waits
        for place, norm in zip(chain.from_iterable(by_dtype.values()), moved.unbind(), strict=True):
            norms[place] = norm
    return torch.stack(norms)


def clip_to_(parameters: Iterable[Tensor], max_norm: float, total: Tensor) -> None:
    """Scale every gradient so that the global norm ``total`` becomes at most ``max_norm``, without a device sync."""
    # torch.nn.utils.clip_grads_with_norm_'s rule, its constant included
    factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
    members = gradients(parameters)
    for device, by_dtype in _places(members).items():
        moved = factor.to(device)
        for places in by_dtype.values():
            _multiply_([members[place] for place in places], moved)


def step_unless(optimizer: Optimizer, found_inf: Tensor, read: HostRead, **kwargs: Any) -> Any:
    """Step the optimizer where ``found_inf`` is 0; where it is 1, leave every parameter and all state as they were.

    A fused optimizer takes the flag on the device. Any other has to be asked for on the host: ``read(found_inf)``.
    Returns what the optimizer returned, ``None`` where it was not called.
    """
    # torch's fused optimizers copy the flag to the host without waiting for it, and their kernel reads it at once
    offloaded = found_inf.device.type != "cpu" and any(one.device.type == "cpu" for one in parameters_of(optimizer))
    first = isinstance(optimizer, torch.optim.SGD) and _makes_momentum(optimizer)
    if not takes_flag(optimizer) or offloaded or first:
        return None if read(found_inf) else optimizer.step(**kwargs)
    flagged = cast("Any", optimizer)
    flagged.grad_scale, flagged.found_inf = None, found_inf
    try:
        return optimizer.step(**kwargs)
    finally:
        del flagged.grad_scale, flagged.found_inf


def takes_flag(optimizer: Optimizer) -> bool:
    """True if the optimizer is one of torch's fused ones, whose step skips by ``found_inf`` on the device.

    Other classes have the same attribute and do something else: apex divides and skips only if it is given a scaler, a
    pair of optimizers under one name does neither. Their steps are decided on the host.
    """
    # A wrapper answers with the attributes of the optimizer in it, which would not see the flag.
    claimed = vars(optimizer).get(compat.TAKES_FLAG, getattr(type(optimizer), compat.TAKES_FLAG, False))
    if claimed is not True or not steps_as_torch(optimizer):
        return False
    # a group from a checkpoint may be without ``fused``
    return all(group.get("fused", True) for group in optimizer.param_groups)


def steps_as_torch(optimizer: Any) -> bool:
    """True if ``step`` is that of an optimizer of torch's: no subclass has its own, and nobody replaced it."""
    return getattr(optimizer.step, "__module__", "").startswith("torch.optim.")


def _makes_momentum(optimizer: Optimizer) -> bool:
    # torch (2.13 still) allocates fused SGD's momentum uninitialised and returns before writing it when the very first
    # step is held back: the garbage is then used as momentum. So that step is decided on the host.
    return any(
        group["momentum"] and optimizer.state.get(parameter, {}).get("momentum_buffer") is None
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.grad is not None
    )
