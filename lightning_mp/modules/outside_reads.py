"""Finds who computes with a pinned weight outside of its module's forward, where the pin does not hold."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from lightning_mp.compat.torch import TorchDispatchMode, is_compiled
from lightning_mp.compat.torch_fake import is_fake, storage_key
from lightning_mp.errors import Fault, Faults, PlanError
from lightning_mp.modules.class_swap import original_class
from lightning_mp.modules.pins import PinMap
from lightning_mp.numerics.dtypes import to_torch
from lightning_mp.numerics.nested import floating_in

#: operators that take one dtype: torch ends with an error of its own where theirs differ
_PRODUCTS = frozenset(("mm", "addmm", "bmm", "baddbmm", "addbmm", "linear", "matmul", "convolution", "mv", "addmv"))
#: what a user casts with
_CASTS = (Tensor.to, Tensor.type, Tensor.type_as, Tensor.half, Tensor.bfloat16, Tensor.float)


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
def refused(root: nn.Module, pin_map: PinMap, compute: torch.dtype, *, mixed: bool) -> Generator[None, None, None]:
    """Within, a product outside of any pinned forward that takes a pinned weight in another dtype than the pin's.

    Nothing can be seen inside of compiled modules: where there are any nothing is looked for.

    Raises:
        PlanError: the weight and its pin.
    """
    if not pin_map.members or any(is_compiled(module) for module in root.modules()):
        yield
        return
    calls = _Calls()
    reads = _Reads(pin_map, compute, calls if mixed else None)
    with ExitStack() as stack:
        for member in pin_map.members:
            stack.callback(member.module.register_forward_pre_hook(reads.entered).remove)
            stack.callback(member.module.register_forward_hook(reads.left, always_call=True).remove)
        stack.enter_context(reads)
        stack.enter_context(calls)
        yield


class _Calls(TorchFunctionMode):
    """Knows whether it is the user who casts, or autocast within another function."""

    casting = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.casting = func in _CASTS
        return func(*args, **(kwargs or {}))


class _Reads(TorchDispatchMode):
    def __init__(self, pin_map: PinMap, compute: torch.dtype, calls: _Calls | None) -> None:
        super().__init__()
        self._members = [member for member in pin_map.members if to_torch(member.pin.dtype) != compute]
        self._compute, self._calls, self._inside = compute, calls, 0

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """A compiled function stays one."""
        return True

    def entered(self, *_: Any) -> None:
        self._inside += 1

    def left(self, *_: Any) -> None:
        self._inside -= 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = func.overloadpacket.__name__, kwargs or {}
        if name == "_to_copy" and kwargs.get("dtype") is self._compute:
            if self._calls is not None and not self._calls.casting and not self._inside:
                self._refuse(args[:1])
        elif name in _PRODUCTS:
            floating = floating_in(list(args))
            if len({tensor.dtype for tensor in floating}) > 1:
                self._refuse(floating)
        return func(*args, **kwargs)

    def _refuse(self, tensors: Any) -> None:
        for member in self._members:
            for name in dict(member.module.named_parameters(recurse=False)):
                weight = getattr(member.module, name)
                if any(_is_part(tensor, weight) for tensor in tensors):
                    fault = Fault(
                        f"pin {member.pin.pattern!r} to {member.pin.dtype} on {member.name}.{name}, with which "
                        f"something outside of that module's forward computes in {str(self._compute)[6:]}",
                        "pins on weights that only the module's own forward computes with",
                        f"call {member.name!r} there, pin the module around it that reads the weight, cast the weight "
                        "there yourself, or remove the pin",
                    )
                    raise PlanError([fault], "MixedPrecisionPlan")


def _is_part(tensor: Tensor, weight: Tensor) -> bool:
    """Whether ``tensor`` is ``weight``, or a view of it."""
    if tensor is weight:
        return True
    if isinstance(tensor, DTensor) or isinstance(weight, DTensor) or tensor.device != weight.device:
        return False
    if tensor.dtype != weight.dtype:
        return False
    if is_fake(weight):
        begin, there = weight.storage_offset(), is_fake(tensor) and storage_key(tensor) == storage_key(weight)
        return there and begin <= tensor.storage_offset() < begin + weight.numel()
    # one number that is seen everywhere, as of a weight on another rank, has others' weights behind it
    last = sum((size - 1) * stride for size, stride in zip(weight.shape, weight.stride(), strict=True))
    start, size = weight.data_ptr(), (last + 1) * weight.element_size() if weight.numel() else 0
    return start <= tensor.data_ptr() < start + size
