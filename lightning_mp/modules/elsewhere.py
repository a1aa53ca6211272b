"""Parameters that another process holds: shape and dtype stay, the numbers go, and whoever computes with them is told.

An optimizer is given them all the same, so that its groups and the numbers in its state are those of the whole model.
"""

from __future__ import annotations

from collections.abc import Container
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

_MARK = "_lightning_mp_elsewhere"


def is_elsewhere(parameter: Tensor) -> bool:
    """Whether another process holds the numbers of ``parameter``."""
    return hasattr(parameter, _MARK)


def give_away(model: nn.Module, kept: Container[int], device: torch.device) -> None:
    """Free every parameter of ``model`` but the ``kept``, by ``id``; a module that lacks one raises when called."""
    for name, module in model.named_modules():
        gone = [one for one in module.parameters(recurse=False) if id(one) not in kept]
        fresh = [parameter for parameter in gone if not is_elsewhere(parameter)]
        for parameter in fresh:
            # one number in memory, seen everywhere
            parameter.data = torch.zeros((), dtype=parameter.dtype, device=device).expand(parameter.shape)
            parameter.grad = None
            setattr(parameter, _MARK, True)
        if fresh:
            module.register_forward_pre_hook(cast("Any", partial(_refuse, name)))


def _refuse(name: str, module: nn.Module, inputs: Any) -> None:
    raise RuntimeError(
        f"{name or type(module).__name__} was called where its weights are not: they are those of another pipeline "
        "stage. Load the checkpoint into a module of its own to use the whole model."
    )
