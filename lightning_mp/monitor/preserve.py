"""A module that is run on the side: what it keeps of a step is as before once the run is over."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_mp.compat.torch import buffers_of

_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


@contextmanager
def untouched(root: nn.Module) -> Generator[None, None, None]:
    """Whatever happens within to gradients, buffers and attributes of ``root``'s modules is undone at the end.

    Gradients are put aside, so that a backward pass within begins without any. Buffers, and tensors kept as attributes
    (the sums of torchmetrics), are copied; so are lists, dicts and sets, one level deep.
    """
    undo: list[Callable[[], object]] = []
    for parameter in root.parameters():
        undo.append(partial(setattr, parameter, "grad", parameter.grad))
        parameter.grad = None
    for module in root.modules():
        undo.append(_kept(buffers_of(module)))
        undo.append(_kept(module.__dict__, leave=_OF_EVERY_MODULE))
    try:
        yield
    finally:
        for step in undo:
            step()


def _kept(values: dict[str, Any], leave: frozenset[str] = frozenset()) -> Callable[[], None]:
    """What brings the entries of ``values`` back, with what is in them."""
    before = {name: (value, _copied(value)) for name, value in values.items() if name not in leave}

    def bring_back() -> None:
        for name in [name for name in values if name not in before and name not in leave]:
            del values[name]
        for name, (value, copied) in before.items():
            _fill(value, copied)
            values[name] = value

    return bring_back


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return None if value.is_inference() else value.detach().clone()
    return value.copy() if type(value) in (list, dict, set) else None


def _fill(value: Any, copied: Any) -> None:
    if copied is None:
        return
    if isinstance(value, Tensor):
        with torch.no_grad():  # always: batch norm writes its statistics without counting the version up
            value.copy_(copied)
    elif type(value) is list:
        value[:] = copied
    else:
        value.clear()
        value.update(copied)
