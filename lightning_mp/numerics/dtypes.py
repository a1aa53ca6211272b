"""The short dtype names as torch dtypes, and casts of nested data and of modules."""

from __future__ import annotations

from collections.abc import Collection, Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_mp.compat.torch_fake import is_fake
from lightning_mp.numerics.nested import floating_in, map_tensors

HALF = (torch.float16, torch.bfloat16)
TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def to_torch(name: str) -> torch.dtype:
    """``"bf16"`` → ``torch.bfloat16``; the names are those of ``policy.storage_dtype``."""
    return TORCH_DTYPES[name]


def cast_floating(data: Any, dtype: torch.dtype) -> Any:
    """Nested ``data`` with every real floating tensor in it cast to ``dtype``; what needs no cast is not copied."""
    return map_tensors(data, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)


def floating_dtype(data: Any) -> torch.dtype | None:
    """The dtype of the first real floating tensor in nested ``data``, or ``None``."""
    found = floating_in(data)
    return found[0].dtype if found else None


def is_plain(tensor: Tensor) -> bool:
    """Whether it is a real floating tensor of torch's own class; a quantised weight chooses its own storage.

    A tensor without memory (``FakeTensorMode``) stands for one of torch's own.
    """
    return (type(tensor.data) is Tensor or is_fake(tensor.data)) and tensor.is_floating_point()


def cast_module_(
    module: nn.Module,
    dtype: torch.dtype,
    *,
    parameters: bool = True,
    buffers: bool = True,
    only: Collection[torch.dtype] | None = None,
) -> int:
    """Cast a module's own floating parameters and buffers in place (not its children's); how many changed.

    The ``Parameter`` objects stay the same, so that optimizers and ties built on them hold. Tensor subclasses are left
    alone, and where ``only`` is given tensors of other dtypes than those in it.
    """
    changed = 0
    chosen: list[Tensor] = list(module.parameters(recurse=False)) if parameters else []
    chosen += module.buffers(recurse=False) if buffers else []
    for tensor in chosen:
        if not is_plain(tensor) or tensor.dtype == dtype or (only is not None and tensor.dtype not in only):
            continue
        tensor.data = tensor.data.to(dtype)
        tensor.grad = None  # a gradient of the old dtype could not be added to
        changed += 1
    return changed


@contextmanager
def default_dtype(dtype: torch.dtype) -> Generator[None, None, None]:
    """Tensors made in it without a dtype get ``dtype``; torch's default comes back, also after a failure."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
