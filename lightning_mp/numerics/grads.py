"""Gradients of one optimizer: unscale and check in one pass, norm, and a step that a device flag can hold back."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_mp.compat import torch as compat
from lightning_mp.numerics.dtypes import HALF

HostRead = Callable[[Tensor], bool]


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """Every parameter the optimizer updates."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


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
            compat.unscale_and_check_(members, inverse, flag)
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
    members = list(grads)
    kinds = [(gradient.device, gradient.dtype) for gradient in members]
    if kinds and kinds.count(kinds[0]) == len(kinds):
        return (members,)  # nearly always
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for kind, gradient in zip(kinds, members, strict=True):
        groups.setdefault(kind, []).append(gradient)
    return groups.values()


def clip_grad_norm_(parameters: Iterable[Tensor], max_norm: float) -> Tensor:
    """Clip by the global 2-norm, computed in fp32 whatever the gradients' dtypes; the norm before, on the device.

    For fp32 gradients this is ``torch.nn.utils.clip_grad_norm_``, bit for bit. A norm of fp16 gradients taken in fp16
    would overflow at 65,504.
    """
    members = [parameter for parameter in parameters if parameter.grad is not None]
    if not any(parameter.dtype in HALF for parameter in members):
        return torch.nn.utils.clip_grad_norm_(members, max_norm)
    grads = [cast("Tensor", parameter.grad) for parameter in members]
    wide = [torch.float32 if gradient.dtype in HALF else None for gradient in grads]
    norms = [torch.linalg.vector_norm(grad, dtype=dtype).float() for grad, dtype in zip(grads, wide, strict=True)]
    total = torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]))
    torch.nn.utils.clip_grads_with_norm_(members, max_norm, total)
    return total


def step_unless(optimizer: Optimizer, found_inf: Tensor, read: HostRead, **kwargs: Any) -> Any:
    """Step the optimizer where ``found_inf`` is 0; where it is 1, leave every parameter and all state as they were.

    A fused optimizer takes the flag on the device. Any other has to be asked for on the host: ``read(found_inf)``.
    Returns what the optimizer returned, ``None`` where it was not called.
    """
    if not _takes_flag(optimizer):
        return None if read(found_inf) else optimizer.step(**kwargs)
    flagged = cast("Any", optimizer)
    flagged.grad_scale, flagged.found_inf = None, found_inf
    try:
        return optimizer.step(**kwargs)
    finally:
        del flagged.grad_scale, flagged.found_inf


def _takes_flag(optimizer: Optimizer) -> bool:
    if not compat.takes_flag(optimizer):
        return False
    # torch (2.13 still) allocates fused SGD's momentum uninitialised and returns before writing it when the very first
    # step is held back: the garbage is then used as momentum. So that step is decided on the host.
    return not (
        isinstance(optimizer, torch.optim.SGD)
        and any(
            group["momentum"] and optimizer.state[parameter].get("momentum_buffer") is None
            for group in optimizer.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        )
    )
