"""Tensors in nested data: tuples, named tuples, lists, mappings (transformers' ``ModelOutput`` too) and dataclasses.

Anything else, such as a key-value cache, is not looked into.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from copy import copy
from dataclasses import fields, is_dataclass
from typing import Any, cast

from torch import Tensor


def tensors_in(data: Any) -> list[Tensor]:
    """Every tensor in ``data``, in order."""
    if isinstance(data, Tensor):
        return [data]
    return [tensor for _, item in _items(data) for tensor in tensors_in(item)]


def floating_in(data: Any) -> list[Tensor]:
    """Every real floating tensor in ``data``, in order."""
    return [tensor for tensor in tensors_in(data) if tensor.is_floating_point()]


def map_tensors(data: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """``data`` with ``change`` applied to every tensor; a container in which nothing changes is not copied."""
    if isinstance(data, Tensor):
        return change(data)
    changed: dict[Any, Any] = {}
    for key, old in _items(data):
        new = map_tensors(old, change)
        if new is not old:
            changed[key] = new
    return _replaced(data, changed) if changed else data


def _items(data: Any) -> list[tuple[Any, Any]]:
    if isinstance(data, Mapping):
        return list(cast("Mapping[Any, Any]", data).items())
    if isinstance(data, (tuple, list)):
        return list(enumerate(cast("list[Any]", data)))
    if is_dataclass(data) and not isinstance(data, type):
        return [(item.name, getattr(data, item.name)) for item in fields(data)]
    return []


def _replaced(data: Any, changed: dict[Any, Any]) -> Any:
    if isinstance(data, (tuple, list)):
        items = [changed.get(index, item) for index, item in enumerate(cast("list[Any]", data))]
        return type(data)(*items) if hasattr(data, "_fields") else type(data)(items)
    if isinstance(data, Mapping) and not isinstance(data, MutableMapping):
        return cast("Any", type(data))({**data, **changed})
    copied = copy(data)  # keeps what a subclass has besides its items (a defaultdict's factory)
    for key, value in changed.items():  # transformers' ModelOutput has no update()
        if isinstance(data, Mapping):
            copied[key] = value
        else:
            object.__setattr__(copied, key, value)  # also where the dataclass is frozen
    return copied
