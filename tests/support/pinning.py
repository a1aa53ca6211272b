"""Pins applied to a bare module, as the eager engine applies them, and what ran in which dtype."""

from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_mp.errors import Faults
from lightning_mp.modules import pins
from lightning_mp.numerics.dtypes import cast_, castable, to_torch
from lightning_mp.policy import Pin

Declared = dict[str, Any] | list[Pin]


def declared(spec: Declared) -> list[Pin]:
    return spec if isinstance(spec, list) else [Pin(pattern, dtype) for pattern, dtype in spec.items()]


def resolve(root: nn.Module, spec: Declared) -> pins.PinMap:
    faults = Faults()
    found = pins.resolve(root, declared(spec), faults)
    faults.raise_if_any()
    return found


def dtypes_by_name(root: nn.Module, spec: Declared) -> dict[str, str]:
    return {member.name: member.pin.dtype for member in resolve(root, spec).members}


def pin(root: nn.Module, spec: Declared, *, mode: str = "bf16-mixed", device: str = "cpu") -> nn.Module:
    """``root`` stored and pinned as the mode says, in place."""
    mixed, compute = mode.endswith("-mixed"), "fp16" if mode.startswith("16") else "bf16"
    found = resolve(root, spec)
    covered = {id(member.module) for member in found.members}
    if not mixed:
        for module in root.modules():
            if id(module) not in covered:
                cast_(chain(*castable(module)), to_torch(compute))
    pins.apply(found, mixed=mixed, compute_dtype=to_torch(compute), device_type=device)
    return root


def stored(root: nn.Module) -> dict[str, torch.dtype]:
    return {name: parameter.dtype for name, parameter in root.named_parameters()}


class Ran(TorchDispatchMode):
    """Records which aten operators ran, in the dtype of their first floating input."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        self.names = names
        self.dtypes: list[torch.dtype] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in self.names:
            self.dtypes.append(next(arg.dtype for arg in args if isinstance(arg, Tensor) and arg.is_floating_point()))
        return func(*args, **(kwargs or {}))


def products(root: nn.Module, *inputs: Any, autocast: torch.dtype | None = None, **named: Any) -> list[torch.dtype]:
    """The dtypes in which matrix products with a bias ran in one forward, in order."""
    with Ran("addmm", "linear", "mm") as ran, torch.autocast("cpu", autocast, enabled=autocast is not None):
        root(*inputs, **named)
    return ran.dtypes
