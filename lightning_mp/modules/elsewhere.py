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


def give_away(name: str, module: nn.Module, kept: Container[str], device: torch.device) -> None:
    """Free every parameter of ``module``'s own but the ``kept``, by key; if it lacks one, it raises when called."""
    gone = [one for key, one in module.named_parameters(recurse=False) if key not in kept and not is_elsewhere(one)]
    for parameter in gone:
        # one number in memory, seen everywhere
        parameter.data = torch.zeros((), dtype=parameter.dtype, device=device).expand(parameter.shape)
        parameter.grad = None
        setattr(parameter, _MARK, True)
    if gone:
        module.register_forward_pre_hook(cast("Any", partial(_refuse, name)))


def _refuse(name: str, module: nn.Module, inputs: Any) -> None:
    raise RuntimeError(
        f"{name or type(module).__name__} was called where its weights are not: they are those of another pipeline "
        "stage. Load the checkpoint into a module of its own to use the whole model."
    )
