"""Numbers that a tensor without memory has nevertheless: those of small integer tensors, such as ids and masks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

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
