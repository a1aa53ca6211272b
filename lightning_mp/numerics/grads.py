"""Gradients: unscale, check, norms over shards, clipping, and a step that a flag can skip."""

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
#: process groups whose ranks together hold all shards of a gradient
Groups = tuple[dist.ProcessGroup, ...]


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """Return every parameter in the optimizer's groups."""
    groups: list[dict[str, Any]] = optimizer.param_groups
    return list(chain.from_iterable(map(itemgetter("params"), groups)))


def drop(optimizer: Optimizer) -> None:
    """Set every gradient of the optimizer to None. torch's optimizers then change nothing."""
    for parameter in parameters_of(optimizer):
        parameter.grad = None


def gradients(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Return the existing gradients as dense real tensors that share their memory.

    A DTensor gives this rank's shard, a complex gradient its real view, and a sparse gradient its
    values. A sparse gradient is replaced by its coalesced form.
    """
    held: list[Tensor] = []
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is None:
            continue
        if gradient.layout is not torch.strided:
            # Coalescing sums entries of one index and may overflow, so it comes before the check.
            parameter.grad = gradient.coalesce()
            gradient = parameter.grad.values()
        if hasattr(gradient, "to_local"):
            gradient = local(gradient)
        held.append(torch.view_as_real(gradient) if gradient.is_complex() else gradient)
    return held


def local(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a DTensor, in the same storage, or any other tensor itself."""
    if not hasattr(tensor, "to_local"):
        return tensor
    with torch.no_grad():  # with autograd, to_local() would be recorded and return a view
        return cast("Any", tensor).to_local()


def unscale_and_check_(grads: Iterable[Tensor], inv_scale: Tensor, found_inf: Tensor, *, scaled: bool = True) -> None:
    """Multiply ``grads`` by ``inv_scale`` in place. Set ``found_inf`` to 1 if one is not finite.

    ``inv_scale`` and ``found_inf`` are fp32 scalars on one device. There is no device sync. Each
    device and dtype takes one launch of the multi-tensor kernel behind ``torch.amp.GradScaler``.
    bf16 off the CPU is checked by its norm instead, because that kernel does not take it.
    ``scaled=False`` only checks: ``inv_scale`` must be 1, and gradients keep their bits.
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
    """Set ``found_inf`` to 1 if the largest magnitude of bf16 ``members`` is not finite.

    torch's kernel does not take bf16 on CUDA (pytorch/pytorch issue 127176).
    """
    finite = (torch.stack([*compat.norms(members, math.inf)]) <= torch.finfo(torch.bfloat16).max).all()
    found_inf.masked_fill_(~finite, 1.0)


def _multiply_(members: list[Tensor], factor: Tensor) -> None:
    """Multiply ``members`` by ``factor`` in place, in one launch.

    On CUDA the factor is cast to the members' dtype. With another dtype torch launches a kernel for
    each member.
    """
    compat.multiply_(members, factor if factor.device.type == "cpu" else factor.to(members[0].dtype))


def _places(tensors: Sequence[Tensor]) -> dict[torch.device, dict[torch.dtype, list[int]]]:
    """Return the indices in ``tensors`` by device and dtype.

    Empty tensors are left out: a rank may hold no part of a parameter.
    """
    by_device: dict[torch.device, dict[torch.dtype, list[int]]] = {}
    for place, tensor in enumerate(tensors):
        if tensor.numel():
            by_device.setdefault(tensor.device, {}).setdefault(tensor.dtype, []).append(place)
    return by_device


def clip_grad_norm_(parameters: Iterable[Tensor], max_norm: float) -> Tensor:
    """Clip by the global 2-norm. Return the norm before clipping, a scalar on the device.

    If a parameter with a gradient is in half precision, the norm is computed in fp32, because it
    would overflow in fp16. Otherwise this is ``torch.nn.utils.clip_grad_norm_``, bit for bit.
    """
    members = [parameter for parameter in parameters if parameter.grad is not None]
    if set(map(_DTYPE, members)).isdisjoint(HALF):
        return torch.nn.utils.clip_grad_norm_(members, max_norm)
    grads = [cast("Tensor", parameter.grad) for parameter in members]
    total = torch.linalg.vector_norm(_norms(grads, grads[0].device))
    torch.nn.utils.clip_grads_with_norm_(members, max_norm, total)
    return total


def shard_groups(gradient: Tensor, plain: Groups) -> Groups:
    """Return the process groups over which ``gradient`` is split.

    A plain tensor has no placements, so ``plain`` is returned. The result is empty for a DTensor
    that is replicated on every mesh dimension.
    """
    if not hasattr(gradient, "to_local"):
        return plain
    sharded, groups = cast("Any", gradient), list[dist.ProcessGroup]()
    for index, kind in enumerate(sharded.placements):
        if not kind.is_replicate():  # not is_shard(): False for a strided shard
            groups.append(sharded.device_mesh.get_group(index))
    return tuple(groups)


def sum_partial_(parameters: Iterable[Tensor]) -> None:
    """Replace partial gradients by their sum over ranks. Tensor parallelism leaves some partial.

    Each redistribution is a collective of the gradient's mesh.
    """
    for parameter in parameters:
        gradient = cast("Any", parameter.grad)
        if hasattr(gradient, "to_local") and any(map(methodcaller("is_partial"), gradient.placements)):
            parameter.grad = gradient.redistribute(gradient.device_mesh, cast("Any", parameter).placements)


def global_norm(parameters: Iterable[Tensor], device: torch.device, plain: Groups = ()) -> Tensor:
    """Return the 2-norm over all gradients and all their shards: an fp32 scalar on ``device``.

    A collective: gradients that are split over the same process groups take one all-reduce in each
    of these groups. ``plain`` are the groups over which plain tensors are split, as FSDP1's are.
    """
    members: dict[Groups, list[Tensor]] = {}  # in an order that is the same on all ranks
    for parameter in parameters:
        if parameter.grad is not None:
            members.setdefault(shard_groups(parameter.grad, plain), []).append(parameter)
        elif plain:  # a rank without a shard of a small parameter still joins the all-reduce
            members.setdefault(plain, [])
    total = torch.zeros((), dtype=torch.float32, device=device)
    for groups, held in members.items():
        part = squares(gradients(held), device).sum()
        for group in groups:
            dist.all_reduce(part, group=group)
        total = total + part
    return total.sqrt()


def over_shards(norm: Tensor, order: float, groups: Groups, *, error_if_nonfinite: bool = False) -> Tensor:
    """Return the norm of all shards from ``norm``, the norm of this rank's shards. A collective.

    Raises:
        RuntimeError: the result is not finite, and ``error_if_nonfinite`` is True.
    """
    largest = math.isinf(order)
    total = norm.clone() if largest else norm.pow(order)
    for group in groups:
        dist.all_reduce(total, op=dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM, group=group)
    total = total if largest else total.pow(1.0 / order)
    if error_if_nonfinite and not torch.isfinite(total):
        raise RuntimeError(f"The total norm of order {order} for gradients is non-finite, so it cannot be clipped.")
    return total


def squares(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return the sum of squares of each tensor, in fp32: shape (len(tensors),) on ``device``."""
    if not tensors:
        return torch.zeros(0, dtype=torch.float32, device=device)
    return _norms(tensors, device).square()


def _norms(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    # A norm that is computed in half precision would overflow, or stop growing.
    norms = [torch.zeros((), dtype=torch.float32, device=device)] * len(tensors)
    for by_dtype in _places(tensors).values():
        alike: list[Tensor] = []
        for dtype, places in by_dtype.items():
            found = compat.norms(
                [tensors[place] for place in places], 2, dtype=torch.float32 if dtype in HALF else None
            )
            alike.append(torch.stack([*found]).to(torch.float32))
        # All norms of a device are moved together, because a copy between devices waits.
        moved = (torch.cat(alike) if len(alike) > 1 else alike[0]).to(device)
        for place, norm in zip(chain.from_iterable(by_dtype.values()), moved.unbind(), strict=True):
            norms[place] = norm
    return torch.stack(norms)


def clip_to_(parameters: Iterable[Tensor], max_norm: float, total: Tensor) -> None:
    """Scale every gradient in place so that the global norm ``total`` becomes at most ``max_norm``.

    There is no device sync.
    """
    # torch.nn.utils.clip_grads_with_norm_'s rule, its constant included
    factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
    members = gradients(parameters)
    for device, by_dtype in _places(members).items():
        moved = factor.to(device)
        for places in by_dtype.values():
            _multiply_([members[place] for place in places], moved)


def step_unless(optimizer: Optimizer, found_inf: Tensor, read: HostRead, **kwargs: Any) -> Any:
    """Step the optimizer if ``found_inf`` is 0. If it is 1, change no parameter and no state.

    torch's fused optimizers are called in both cases and read the flag on the device. For others,
    ``read(found_inf)`` reads it on the host, a device sync. The host also decides for
    parameters on a CPU with a flag on another device, and for a step of SGD that makes momentum.

    Return the value of the optimizer's ``step``, or ``None`` if it was not called.
    """
    # torch's fused optimizers copy the flag to the CPU and read it before the copy is finished.
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
    """True if the optimizer is one of torch's fused ones, whose step skips by ``found_inf``.

    Other classes have the same attribute with another meaning, so the host decides for them. apex
    divides and skips only if it gets a scaler. A class of paired optimizers does neither.
    """
    # A wrapper forwards attributes of its optimizer, and that optimizer would not see the flag.
    claimed = vars(optimizer).get(compat.TAKES_FLAG, getattr(type(optimizer), compat.TAKES_FLAG, False))
    if claimed is not True or not steps_as_torch(optimizer):
        return False
    # A group from a checkpoint may lack the key "fused".
    return all(group.get("fused", True) for group in optimizer.param_groups)


def steps_as_torch(optimizer: Any) -> bool:
    """True if the optimizer's ``step`` is torch's own, neither overridden nor replaced."""
    return getattr(optimizer.step, "__module__", "").startswith("torch.optim.")


def _makes_momentum(optimizer: Optimizer) -> bool:
    # torch (2.13 still) allocates fused SGD's momentum uninitialised. If the first step is skipped,
    # the momentum is never written, and later steps use garbage. So the host decides this step.
    return any(
        group["momentum"] and optimizer.state.get(parameter, {}).get("momentum_buffer") is None
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.grad is not None
    )
