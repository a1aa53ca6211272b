"""Copies of a module and of a batch that have shapes and dtypes, and no memory."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_mp.compat.lightning import attached_to
from lightning_mp.compat.torch_fake import mapped, without_modes
from lightning_mp.tracing import values


def fake(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor like ``tensor`` under the ``FakeTensorMode`` that is on; a parameter where it is one."""
    like = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(like, requires_grad=tensor.requires_grad)
    value = values.known(tensor)
    if value is not None and values.keeps(tensor):
        with without_modes():
            values.keep(like, value.to("cpu", copy=True))
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
