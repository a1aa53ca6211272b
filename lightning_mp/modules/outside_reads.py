"""Finds who multiplies with a pinned weight outside of its module's forward, where the pin does not hold."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn
from torch.overrides import TorchFunctionMode

from lightning_mp.compat.torch import base_of, is_compiled
from lightning_mp.errors import Fault, Faults, PlanError
from lightning_mp.modules.class_swap import original_class
from lightning_mp.modules.pins import PinMap, PinnedModule
from lightning_mp.numerics.nested import tensors_in

#: by the names of torch's functions and methods
_PRODUCTS = frozenset(("linear", "matmul", "__matmul__", "__rmatmul__", "mm", "addmm", "bmm", "mv", "einsum"))


def check(root: nn.Module, pin_map: PinMap, compute: str, faults: Faults) -> None:
    """Note pins on the projection of a ``MultiheadAttention`` that is not itself pinned so: it reads the weight."""
    pinned = {id(member.module): member for member in pin_map.members}
    for name, module in root.named_modules():
        attends = isinstance(module, nn.MultiheadAttention)
        if not attends or original_class(module).forward is not nn.MultiheadAttention.forward:
            continue
        member = pinned.get(id(module.out_proj))
        around = pinned[id(module)].pin.dtype if id(module) in pinned else compute
        if member is not None and member.pin.dtype != around:
            dtype, pattern = member.pin.dtype, member.pin.pattern
            faults.add(
                f"pin {pattern!r} on {member.name!r}, whose weight MultiheadAttention reads without calling it",
                f"a pin on the whole attention, {name!r}: what is computed with the weight runs in its dtype, {around}",
                f"write pins={{{name!r}: {dtype!r}}}, or remove the pin",
            )


@contextmanager
def refused(root: nn.Module, pin_map: PinMap, compute: str) -> Generator[None, None, None]:
    """Within, a product with a pinned weight, outside of any pinned forward, raises; not where modules are compiled.

    Raises:
        PlanError: the weight and its pin.
    """
    members = [member for member in pin_map.members if member.pin.dtype != compute]
    if not members or any(is_compiled(module) for module in root.modules()):
        yield
        return
    reads = _Reads(members)
    with ExitStack() as stack:
        for member in pin_map.members:
            stack.callback(member.module.register_forward_pre_hook(reads.entered).remove)
            stack.callback(member.module.register_forward_hook(reads.left, always_call=True).remove)
        stack.enter_context(reads)
        yield


class _Reads(TorchFunctionMode):
    def __init__(self, members: list[PinnedModule]) -> None:
        super().__init__()
        self._members, self._inside = members, 0

    def entered(self, *_: Any) -> None:
        self._inside += 1

    def left(self, *_: Any) -> None:
        self._inside -= 1

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self._inside and getattr(func, "__name__", "") in _PRODUCTS:
            given = tensors_in((args, kwargs or {}))
            self._refuse({id(one) for tensor in given for one in (tensor, base_of(tensor))})
        return func(*args, **(kwargs or {}))

    def _refuse(self, given: set[int]) -> None:
        for member in self._members:
            for name, weight in member.module.named_parameters(recurse=False):
                if id(weight) in given:
                    fault = Fault(
                        f"{member.name}.{name} is pinned to {member.pin.dtype} ({member.pin.pattern!r}), and something "
                        "outside of that module's forward multiplies with it",
                        "",
                        f"call {member.name!r} there, pin the module around it, cast the weight there yourself, or "
                        "remove the pin",
                    )
                    raise PlanError([fault], "MixedPrecisionPlan")
