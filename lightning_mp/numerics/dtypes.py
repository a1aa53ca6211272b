"""The short dtype names as torch dtypes, and casts of nested inputs and of modules."""

from __future__ import annotations

from collections.abc import Generator, Mapping, MutableMapping
from contextlib import contextmanager
from copy import copy
from dataclasses import fields, is_dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

HALF = (torch.float16, torch.bfloat16)
TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def to_torch(name: str) -> torch.dtype:
    """``"bf16"`` → ``torch.bfloat16``; the names are those of ``policy.parse_dtype``."""
    return TORCH_DTYPES[name]


def cast_floating(data: Any, dtype: torch.dtype) -> Any:
    """``data`` with every real floating tensor in it cast to ``dtype``.

    Looks into tuples, named tuples, lists, mappings (transformers' ``ModelOutput`` included) and dataclasses; anything
    else, such as a key-value cache, is handed through as it is. What needs no cast is not copied.
    """
    if isinstance(data, Tensor):
        return data.to(dtype) if data.is_floating_point() and data.dtype != dtype else data
    if isinstance(data, (tuple, list)):
        items = [cast_floating(item, dtype) for item in cast("list[Any]", data)]
        if all(new is old for new, old in zip(items, cast("list[Any]", data), strict=True)):
            return data
        return type(data)(*items) if hasattr(data, "_fields") else type(data)(items)
    if isinstance(data, Mapping):
        return _cast_mapping(cast("Mapping[Any, Any]", data), dtype)
    return _cast_fields(data, dtype) if is_dataclass(data) and not isinstance(data, type) else data


def _cast_fields(data: Any, dtype: torch.dtype) -> Any:
    changed: dict[str, Any] = {}
    for item in fields(data):
        old = getattr(data, item.name)
        new = cast_floating(old, dtype)
        if new is not old:
            changed[item.name] = new
    if not changed:
        return data
    copied = copy(data)
    for name, value in changed.items():
        object.__setattr__(copied, name, value)  # also where it is frozen
    return copied


def _cast_mapping(data: Mapping[Any, Any], dtype: torch.dtype) -> Mapping[Any, Any]:
    changed: dict[Any, Any] = {}
    for key, old in data.items():
        new = cast_floating(old, dtype)
        if new is not old:
            changed[key] = new
    if not changed:
        return data
    if not isinstance(data, MutableMapping):
        return cast("Any", type(data))({**data, **changed})
    copied = copy(data)  # keeps what a subclass carries besides its items (a defaultdict's factory)
    for key, value in changed.items():  # transformers' ModelOutput has no update()
        copied[key] = value
    return copied


def floating_dtype(data: Any) -> torch.dtype | None:
    """The dtype of the first real floating tensor in ``data``, or ``None``."""
    if isinstance(data, Tensor):
        return data.dtype if data.is_floating_point() else None
    if isinstance(data, Mapping):
        data = list(cast("Mapping[Any, Any]", data).values())
    elif is_dataclass(data) and not isinstance(data, type):
        data = [getattr(data, item.name) for item in fields(data)]
    if isinstance(data, (tuple, list)):
        for item in cast("list[Any]", data):
            found = floating_dtype(item)
            if found is not None:
                return found
    return None


def cast_module_(module: nn.Module, dtype: torch.dtype, *, parameters: bool = True, buffers: bool = True) -> int:
    """Cast a module's own floating parameters and buffers in place (not its children's); how many changed.

    The ``Parameter`` objects stay the same, so that optimizers and ties built on them hold. Tensor subclasses are left
    alone: a quantised weight chooses its own storage.
    """
    changed = 0
    chosen: list[Tensor] = list(module.parameters(recurse=False)) if parameters else []
    chosen += module.buffers(recurse=False) if buffers else []
    for tensor in chosen:
        if type(tensor.data) is not Tensor or not tensor.is_floating_point() or tensor.dtype == dtype:
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
