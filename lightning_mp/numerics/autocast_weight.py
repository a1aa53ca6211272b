"""A weight that is held in half precision where autocast alone computes with it, and takes part as an fp32 one."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_mp.compat.torch import NO_TORCH_FUNCTION, TorchDispatchMode, as_wrapper
from lightning_mp.errors import Fault, PlanError
from lightning_mp.numerics.dtypes import TORCH_DTYPES, floating_in

#: set on views of a weight, to its name
_PART_OF = "lmp_part_of"
#: modules that a user's call goes through
_NOT_THE_USERS = ("torch.", "deepspeed.", "lightning_mp.", "lightning.", "pytorch_lightning.")


class AutocastWeight(Tensor):
    """Reports fp32 and holds ``held``: autocast's cast is answered with an alias of it, so that nothing is copied.

    Views of it are such weights again. Autograd casts the gradient of each use to fp32 before it adds them, as for a
    weight that is fp32: a plain half one would add in half.

    Raises:
        PlanError: it is used in any other way, which would need the fp32 values; naming the weight and the pin.
    """

    held: Tensor
    label: str
    __torch_function__ = NO_TORCH_FUNCTION

    def __new__(cls, held: Tensor, label: str) -> AutocastWeight:
        weight = as_wrapper(cls, held, torch.float32)
        weight.held, weight.label = held, label
        return weight

    def __init__(self, held: Tensor, label: str) -> None: ...

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"AutocastWeight({self.label!r}, {tuple(self.shape)}, held in {self.held.dtype})"

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["held"], None  # without the name: blocks that differ in it alone share a graph

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], _context: None, _size: Any, _stride: Any) -> AutocastWeight:
        return AutocastWeight(inner["held"], "a weight of a compiled module")

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        weight, kwargs = args[0] if args else None, kwargs or {}
        if isinstance(weight, cls):
            held, label, name = weight.held, weight.label, func.overloadpacket.__name__
            if name == "_to_copy" and kwargs.get("dtype") is held.dtype:
                return held.detach()
            if func.is_view:
                return _wrapped(func(held, *args[1:], **kwargs), label)
            if reads_no_value(name):
                return func(held, *args[1:], **{"dtype": torch.float32, **kwargs})
        other = next(item for item in floating_in([args, kwargs]) if isinstance(item, AutocastWeight))
        raise other_use(other.label, other.held.dtype, func)


def _wrapped(found: Any, label: str) -> Any:
    return AutocastWeight(found, label) if isinstance(found, Tensor) else [AutocastWeight(one, label) for one in found]


def reads_no_value(name: str) -> bool:
    """Whether the function of that name takes a tensor's shape, dtype or device alone."""
    return name.endswith("_like") or name.startswith("new_")


def other_use(name: str, dtype: torch.dtype, func: Any) -> PlanError:
    """What to say where ``func`` takes the weight ``name``, of which only its values in ``dtype`` are there."""
    frame = inspect.currentframe()
    while frame is not None and f"{frame.f_globals.get('__name__', '')}.".startswith(_NOT_THE_USERS):
        frame = frame.f_back
    where = f", {Path(frame.f_code.co_filename).name}:{frame.f_lineno}" if frame is not None else ""
    word = next(word for word, named in TORCH_DTYPES.items() if named is dtype)
    fault = Fault(
        f"{name} is {word} under this strategy, where autocast alone computes with it; something reads it "
        f"outside a matmul ({func.overloadpacket.__name__}{where})",
        "",
        f"pin it: pins={{{name.rpartition('.')[0]!r}: 'fp32'}}",
    )
    return PlanError([fault], "MixedPrecisionPlan")


class CastAlone(TorchDispatchMode):
    """Within, fp32 tensors that hold values of ``dtype`` may be used as an ``AutocastWeight`` may.

    Args:
        names: by ``id``, the name of each.
        dtype: what autocast casts to.

    Raises:
        PlanError: one of them, or a view of it, is used in another way.
    """

    def __init__(self, names: Mapping[int, str], dtype: torch.dtype) -> None:
        super().__init__()
        self._names, self._dtype = names, dtype

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """A compiled function stays one."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for tensor in floating_in([args, kwargs or {}]):
            name = self._names.get(id(tensor)) or getattr(tensor, _PART_OF, None)
            if name is None:
                continue
            if func.is_view:
                for view in floating_in([found]):
                    setattr(view, _PART_OF, name)
            elif not _reads_in_half(func, kwargs or {}, self._dtype):
                raise other_use(name, self._dtype, func)
        return found


def _reads_in_half(func: Any, kwargs: Mapping[str, Any], dtype: torch.dtype) -> bool:
    """Whether it casts to ``dtype``, or reads no value."""
    name = func.overloadpacket.__name__
    return reads_no_value(name) or (name == "_to_copy" and kwargs.get("dtype") is dtype)
