"""Copies of a module and of a batch that have shapes and dtypes, and no memory.

Small integer tensors, such as ids and masks, keep their numbers, so that shapes made of them are right.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_mp.compat.lightning import attached_to
from lightning_mp.compat.torch_fake import constant_of, is_fake, leaves, mapped, overwritten, without_modes

#: entries of a tensor whose numbers are kept: a mask over 2048 x 2048 tokens
_MOST = 2**22
_VALUE = "_lightning_mp_value"
_CPU = torch.device("cpu")
#: numbers that were overwritten by unknown ones
_UNKNOWN = "_lightning_mp_unknown"


def keep(tensor: Tensor, value: Tensor) -> None:
    """Remember ``value`` as the numbers of ``tensor``."""
    setattr(tensor, _VALUE, value)


def keeps(tensor: Tensor) -> bool:
    """Whether the numbers of such a tensor are kept."""
    return not (tensor.is_floating_point() or tensor.is_complex()) and tensor.numel() <= _MOST


def known(tensor: Tensor) -> Tensor | None:
    """The numbers of ``tensor``, or ``None``."""
    if not is_fake(tensor):
        return None if tensor.is_meta else tensor
    value = getattr(tensor, _VALUE, None)
    if value is None or getattr(value.untyped_storage(), _UNKNOWN, False):
        return constant_of(tensor)
    return value


def computed(func: Any, args: Any, kwargs: Any) -> Any:
    """What ``func`` returns for the numbers of its arguments; ``None`` where they are not all known."""
    tensors = [leaf for leaf in leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    values = {id(tensor): known(tensor) for tensor in tensors}
    if any(value is None for value in values.values()) or not all(map(keeps, tensors)):
        for tensor in leaves(overwritten(func, args, kwargs)):
            value = getattr(tensor, _VALUE, None)
            if value is not None:
                setattr(value.untyped_storage(), _UNKNOWN, True)
        return None
    if not tensors and not _whole(func, args, kwargs):
        return None

    def real(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return values[id(leaf)]
        return _CPU if isinstance(leaf, torch.device) else leaf

    with without_modes():
        return func(*mapped(real, args), **mapped(real, kwargs))


def _whole(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether a tensor that is made from nothing is small and of whole numbers."""
    dtype = kwargs.get("dtype")
    if "random" in func.__name__ or "rand" in func.__name__ or func.__name__.startswith("empty"):
        return False
    sizes = args[0] if args and isinstance(args[0], (list, tuple)) else [a for a in args if isinstance(a, (int, float))]
    small = all(isinstance(size, (int, float)) and abs(size) <= _MOST for size in sizes)
    if dtype is None:
        named = func.__name__.startswith(("arange", "full", "scalar_tensor"))
        return small and named and all(isinstance(leaf, (int, bool)) for leaf in leaves(args))
    return small and not dtype.is_floating_point and not dtype.is_complex


# ---------------------------------------------------------------------- copies


def fake(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor like ``tensor`` under the ``FakeTensorMode`` that is on; a parameter where it is one."""
    like = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(like, requires_grad=tensor.requires_grad)
    value = known(tensor)
    if value is not None and keeps(tensor):
        with without_modes():
            keep(like, value.to("cpu", copy=True))
    return like.requires_grad_(tensor.requires_grad) if tensor.is_leaf else like


class FakeCopies(TorchFunctionMode):
    """``deepcopy`` of a tensor that is no parameter, wherever it is kept, is a fake of it."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__deepcopy__:
            tensor, memo = args
            if id(tensor) not in memo:
                memo[id(tensor)] = fake(tensor, self._device)
            return memo[id(tensor)]
        return func(*args, **(kwargs or {}))


def fake_module(module: nn.Module, device: torch.device) -> Any:
    """Within ``FakeCopies``, a copy of ``module`` with fakes on ``device``, attached to no Trainer; ties hold."""
    memo: dict[int, Any] = {}
    for inner in module.modules():
        memo.update((id(one), None) for one in attached_to(inner))
    for tensor in (*module.parameters(), *module.buffers()):
        memo[id(tensor)] = fake(tensor, device)
        if tensor.grad is not None:
            memo[id(tensor.grad)] = None
    return copy.deepcopy(module, memo)


def fake_batch(batch: Any, device: torch.device) -> Any:
    """``batch`` with fakes for its tensors."""
    return mapped(lambda leaf: fake(leaf, device) if isinstance(leaf, Tensor) else leaf, batch)
