"""Tensors without memory: the values that are known of them, and the life and purpose of their storages.

Small integer tensors, such as ids and masks, keep their values, so that shapes computed from them are right.
"""

import copy
import itertools
import weakref
from collections.abc import Iterable
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_mp.compat.lightning import attached_to
from lightning_mp.compat.torch import TorchDispatchMode, overwritten
from lightning_mp.compat.torch_fake import (
    CAST,
    CHECK,
    INDEX,
    PIN_MEMORY,
    READ,
    UPDATE_SCALE,
    constant_of,
    is_fake,
    leaves,
    mapped,
    storage_key,
    without_modes,
    wraps,
)
from lightning_mp.numerics.grads import local
from lightning_mp.planner.memory import PARTS

#: the block size of CUDA's allocator, in bytes
_CUDA_BLOCK = 512
#: the largest number of entries of a flag, which may be stacked with a count
_SMALL = 2
#: the largest number of entries of a tensor whose values are kept: a mask over 2048 x 2048 tokens
_MOST = 2**22
_VALUE = "_lightning_mp_value"
_CPU = torch.device("cpu")
#: marks a storage whose values were overwritten by unknown ones
_UNKNOWN = "_lightning_mp_unknown"


def keeps(tensor: Tensor) -> bool:
    """True if the values of such a tensor are kept."""
    return not (tensor.is_floating_point() or tensor.is_complex()) and tensor.numel() <= _MOST


def known(tensor: Tensor) -> Tensor | None:
    """Return a tensor with the values of ``tensor``; ``None`` if they are unknown."""
    if not is_fake(tensor):
        return None if tensor.is_meta else tensor
    value = getattr(tensor, _VALUE, None)
    if value is None or getattr(value.untyped_storage(), _UNKNOWN, False):
        return constant_of(tensor)
    return value


def computed(func: Any, args: Any, kwargs: Any) -> Any:
    """Return the result of ``func`` on the values of its tensors.

    ``None`` if one of them is unknown or too large. Tensors that ``func`` writes to are then unknown too.
    """
    tensors = [leaf for leaf in leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    if any(known(tensor) is None for tensor in tensors) or not all(map(keeps, tensors)):
        for tensor in leaves(overwritten(func, args, kwargs)):
            value = getattr(tensor, _VALUE, None)
            if value is not None:
                setattr(value.untyped_storage(), _UNKNOWN, True)
        return None

    def real(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return known(leaf)
        return _CPU if isinstance(leaf, torch.device) else leaf

    with without_modes():
        return func(*mapped(real, args), **mapped(real, kwargs))


def _arbitrary(func: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in func.tags or func.__name__.startswith("empty")


def fake(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a fake like ``tensor`` under the current ``FakeTensorMode``, a parameter for a parameter."""
    like = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(like, requires_grad=tensor.requires_grad)
    value = known(tensor)
    if value is not None and keeps(tensor):
        with without_modes():
            setattr(like, _VALUE, value.to("cpu", copy=True))
    return like.requires_grad_(tensor.requires_grad) if tensor.is_leaf else like


class FakeCopies(TorchFunctionMode):
    """Within, ``deepcopy`` of a tensor returns a fake of it."""

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
    """Return a copy of ``module`` with fakes on ``device``, without its Trainer; ties hold. Call in ``FakeCopies``."""
    memo: dict[int, Any] = {}
    for inner in module.modules():
        memo.update((id(owner), None) for owner in attached_to(inner))
    for tensor in (*module.parameters(), *module.buffers()):
        memo[id(tensor)] = fake(tensor, device)
        if tensor.grad is not None:
            memo[id(tensor.grad)] = None
    return copy.deepcopy(module, memo)


def fake_batch(batch: Any, device: torch.device) -> Any:
    """Return ``batch`` with a fake for each tensor."""
    return mapped(lambda leaf: fake(leaf, device) if isinstance(leaf, Tensor) else leaf, batch)


class Held:
    """A storage: its bytes, its part (one of ``PARTS``), and a weak reference that reports its end."""

    __slots__ = ("bytes", "part", "ref")

    def __init__(self, part: str, ref: weakref.ref[Any]) -> None:
        self.bytes, self.part, self.ref = 0, part, ref


class Storages(TorchDispatchMode):
    """Counts storages on one type of device while they are alive, and answers reads of values by Python.

    Tensors of the forward pass, recomputed or not, are activations, except casts of a parameter. All other tensors are
    "other" until :meth:`name` names them.
    """

    supports_higher_order_operators: ClassVar[bool] = True  # MXFP8's casts are one

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device = device
        #: (storage, change of its bytes), in order
        self.events: list[tuple[Held, int]] = []
        self.in_forward = False
        self._held: dict[int, Held] = {}
        #: storages of flags for non-finite values, and of tensors computed from them
        self._flags: weakref.WeakSet[Any] = weakref.WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(map(wraps, types)):
            return NotImplemented  # it is called again with the wrapped tensors
        if func is READ:
            return self._read(args[0])
        if func is PIN_MEMORY:  # torch has no fake of it
            return args[0].clone()
        if func is INDEX:
            args = args[0], [index for mask in args[1] for index in self._indices(mask)]
        from_tensors = any(isinstance(leaf, Tensor) for leaf in leaves((args, kwargs)))
        value = computed(func, args, kwargs) if from_tensors else None
        if value is not None and torch.Tag.dynamic_output_shape in func.tags:
            out = mapped(lambda leaf: fake(leaf, args[0].device), value)
        else:
            out = func(*args, **kwargs)
        if not from_tensors and isinstance(out, Tensor) and keeps(out) and not _arbitrary(func):
            value = computed(func, args, kwargs)  # a range, or a tensor filled with one number
        for tensor, number in zip(leaves(out), leaves(value), strict=False) if value is not None else ():
            if isinstance(tensor, Tensor):
                setattr(tensor, _VALUE, number)
        made = [tensor for tensor in leaves(out) if isinstance(tensor, Tensor)]
        source = self._held.get(storage_key(args[0])) if func is CAST else None
        forward = self.in_forward or torch.is_grad_enabled()
        part = "activations" if forward and (source is None or source.part != "parameters") else "other"
        for tensor in made:
            self.hold(tensor, part)
        self._follow_flags(func, args, made)
        return out

    def hold(self, tensor: Tensor, part: str) -> None:
        """Begin to count the storage of ``tensor``, or update its size."""
        if wraps(type(tensor)) or tensor.device.type != self.device or tensor.layout is not torch.strided:
            return
        storage, key = tensor.untyped_storage(), storage_key(tensor)
        held = self._held.get(key)
        if held is None:
            held = self._held[key] = Held(part, weakref.ref(storage, lambda _: self._set(self._held.pop(key), 0)))
        self._set(held, storage.nbytes())

    def resized(self, storage: Any) -> None:
        """Update the size of ``storage``, which was resized without an operator."""
        held = self._held.get(storage_key(storage))
        if held is not None:
            self._set(held, storage.nbytes())

    def _set(self, held: Held, size: int) -> None:
        if self.device == "cuda":
            size = -(-size // _CUDA_BLOCK) * _CUDA_BLOCK
        if size != held.bytes:
            self.events.append((held, size - held.bytes))
            held.bytes = size

    def name(self, given: Iterable[Any], part: str) -> None:
        """Assign the storages of tensors to ``part``, from their beginning; of a DTensor this rank's shard."""
        for tensor in (local(each) for each in given if isinstance(each, Tensor)):
            self.hold(tensor, part)
            held = self._held.get(storage_key(tensor))
            if held is not None:
                held.part = part

    @staticmethod
    def _indices(mask: Any) -> list[Any]:
        """Return a boolean mask as indices if its values are known, else the mask alone."""
        value = None if mask is None or mask.dtype is not torch.bool else known(mask)
        if value is None:
            return [mask]
        with without_modes():
            indices = value.nonzero(as_tuple=True)
        return [fake(index, cast("Tensor", mask).device) for index in indices]

    def _read(self, tensor: Any) -> Any:
        """Return the value if it is known; else 0 for a flag, False for a boolean, and 1 for any other tensor."""
        value = known(tensor)
        if value is not None:
            with without_modes():
                return value.item()
        if self._is_flag(tensor):
            return tensor.dtype is not torch.bool and 0.0
        return 1.0 if tensor.is_floating_point() else 1

    def _follow_flags(self, func: Any, args: Any, made: list[Tensor]) -> None:
        if func is CHECK:
            self._flags.add(args[1].untyped_storage())
            return
        small = made and made[0].numel() <= _SMALL and func is not UPDATE_SCALE
        if small and any(isinstance(leaf, Tensor) and self._is_flag(leaf) for leaf in leaves(args)):
            self._flags.update(tensor.untyped_storage() for tensor in made)

    def _is_flag(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage() in self._flags or (tensor.dtype is torch.bool and tensor.numel() == 1)


def peak(events: list[tuple[Held, int]], begin: int, end: int) -> tuple[int, dict[str, int]]:
    """Return the largest number of bytes alive at one moment of ``events[begin:end]``, and its parts."""
    totals = list(itertools.accumulate(size for _, size in events[:end]))[begin:]
    most = max(totals)
    return most, alive(events, begin + totals.index(most) + 1)


def alive(events: list[tuple[Held, int]], end: int) -> dict[str, int]:
    """Return by part the bytes alive after ``events[:end]``."""
    parts = dict.fromkeys(PARTS, 0)
    for held, size in events[:end]:
        parts[held.part] += size
    return parts
