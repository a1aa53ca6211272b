"""Parameters of remote pipeline stages: shape and dtype stay, the storage is freed, and computing with them raises.

An optimizer is given them all the same, so that its groups and the numbers in its state are those of the whole model.
"""

from collections.abc import Container
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

_MARK = "_lightning_mp_remote"


def is_remote(parameter: Tensor) -> bool:
    """Whether another process holds the numbers of ``parameter``."""
    return hasattr(parameter, _MARK)


def free_remote(name: str, module: nn.Module, local: Container[str], device: torch.device) -> None:
    """Free each of ``module``'s own parameters whose key is not in ``local``; lacking one, it raises when called."""
    own = module.named_parameters(recurse=False)
    remote = [parameter for key, parameter in own if key not in local and not is_remote(parameter)]
    for parameter in remote:
        # one number in memory, seen everywhere
        parameter.data = torch.zeros((), dtype=parameter.dtype, device=device).expand(parameter.shape)
        parameter.grad = None
        setattr(parameter, _MARK, True)
    if remote:
        module.register_forward_pre_hook(cast("Any", partial(_refuse, name)))


def _refuse(name: str, module: nn.Module, inputs: Any) -> None:
    raise RuntimeError(
        f"{name or type(module).__name__} was called where its weights are not: they are those of another pipeline "
        "stage. Load the checkpoint into a module of its own to use the whole model."
    )
