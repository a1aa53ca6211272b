"""Which storages are alive when: a dispatch mode that counts them, and what each of them is for."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import Any, cast

import torch
from torch import Tensor

from lightning_mp.compat.torch import TorchDispatchMode
from lightning_mp.compat.torch_fake import (
    CAST,
    CHECK,
    INDEX,
    READ,
    UPDATE_SCALE,
    leaves,
    mapped,
    storage_key,
    without_modes,
    wraps,
)
from lightning_mp.numerics.grads import local
from lightning_mp.planner.memory import PARTS
from lightning_mp.tracing import fakes

#: CUDA's allocator gives out whole blocks of so many bytes
_CUDA_BLOCK = 512
#: flags, and flags stacked with a count
_SMALL = 2


class Held:
    """One storage: its bytes, and which of ``PARTS`` it belongs to."""

    __slots__ = ("bytes", "part")

    def __init__(self, part: str) -> None:
        self.bytes, self.part = 0, part


class Storages(TorchDispatchMode):
    """Counts storages on one type of device while they live, and answers where Python reads a number.

    What the forward pass makes, recomputed or not, is an activation, except for casts of a parameter; the rest is
    "other" until :meth:`name` says otherwise.
    """

    def __init__(self, device: str) -> None:
        super().__init__()
        self._device = device
        #: (storage, bytes that came or went), in order
        self.events: list[tuple[Held, int]] = []
        self.in_forward = False
        self._held: dict[int, Held] = {}
        self._refs: dict[int, weakref.ref[Any]] = {}
        #: storages of flags that say "not finite", and of what was made of them
        self._flags: weakref.WeakSet[Any] = weakref.WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(map(wraps, types)):
            return NotImplemented  # it comes back with what the wrapper holds
        if func is READ:
            return self._read(args[0])
        if func is INDEX:
            args = args[0], [index for mask in args[1] for index in self._indices(mask)]
        value = fakes.computed(func, args, kwargs)
        if value is not None and torch.Tag.dynamic_output_shape in func.tags:
            out = mapped(lambda leaf: fakes.fake(leaf, args[0].device), value)
        else:
            out = func(*args, **kwargs)
        for tensor, number in zip(leaves(out), leaves(value), strict=False) if value is not None else ():
            if isinstance(tensor, Tensor):
                fakes.keep(tensor, number)
        made = [tensor for tensor in leaves(out) if isinstance(tensor, Tensor)]
        if made:
            part = self._part(func, args)
            for tensor in made:
                self.hold(tensor, part)
        self._follow_flags(func, args, made)
        return out

    def _part(self, func: Any, args: Any) -> str:
        if not (self.in_forward or torch.is_grad_enabled()):
            return "other"
        if func is CAST and self._part_of(args[0]) == "parameters":
            return "other"
        return "activations"

    def _part_of(self, tensor: Tensor) -> str | None:
        held = self._held.get(storage_key(tensor))
        return None if held is None else held.part

    # ------------------------------------------------------------------ storages

    def hold(self, tensor: Tensor, part: str) -> None:
        """Count the storage of ``tensor`` from now on, if it is new."""
        if wraps(type(tensor)) or tensor.device.type != self._device:
            return
        if tensor.layout is not torch.strided:
            for inner in (tensor.indices(), tensor.values()) if tensor.layout is torch.sparse_coo else ():
                self.hold(inner, part)
            return
        storage = tensor.untyped_storage()
        key = storage_key(tensor)
        held = self._held.get(key)
        if held is None:
            held = self._held[key] = Held(part)
            self._refs[key] = weakref.ref(storage, lambda _: self._gone(key))
        self._set(held, storage.nbytes())

    def resized(self, storage: Any) -> None:
        """``storage`` was given another size, past every operator."""
        held = self._held.get(storage_key(storage))
        if held is not None:
            self._set(held, storage.nbytes())

    def _set(self, held: Held, size: int) -> None:
        if self._device == "cuda":
            size = -(-size // _CUDA_BLOCK) * _CUDA_BLOCK
        if size != held.bytes:
            self.events.append((held, size - held.bytes))
            held.bytes = size

    def _gone(self, key: int) -> None:
        held = self._held.pop(key)
        del self._refs[key]
        self._set(held, 0)

    def name(self, tensors: Iterable[Tensor], part: str) -> None:
        """The storages of ``tensors`` belong to ``part``, and did from the beginning."""
        for tensor in tensors:
            self.hold(tensor, part)
            held = self._held.get(storage_key(tensor))
            if held is not None:
                held.part = part

    # ------------------------------------------------------------------ what Python reads

    @staticmethod
    def _indices(mask: Any) -> list[Any]:
        """A mask as the indices that it stands for, where its numbers are known; their count is that of the result."""
        value = None if mask is None or mask.dtype is not torch.bool else fakes.known(mask)
        if value is None:
            return [mask]
        with without_modes():
            found = value.nonzero(as_tuple=True)
        return [fakes.fake(index, cast("Tensor", mask).device) for index in found]

    def _read(self, tensor: Any) -> Any:
        """The value where it is known; else 0 of a flag or boolean, 1 of any other: finite gradients, a first count."""
        value = fakes.known(tensor)
        if value is not None:
            with without_modes():
                return value.item()
        if tensor.dtype is torch.bool or tensor.untyped_storage() in self._flags:
            return tensor.dtype is not torch.bool and 0.0
        return 1.0 if tensor.is_floating_point() else 1

    def _follow_flags(self, func: Any, args: Any, made: list[Tensor]) -> None:
        if func is CHECK:
            self._flags.add(args[1].untyped_storage())
            return
        small = made and made[0].numel() <= _SMALL and func is not UPDATE_SCALE
        if small and any(isinstance(leaf, Tensor) and leaf.untyped_storage() in self._flags for leaf in leaves(args)):
            self._flags.update(tensor.untyped_storage() for tensor in made)


def peak(events: list[tuple[Held, int]], begin: int, end: int) -> tuple[int, dict[str, int]]:
    """The most bytes alive at one moment of ``events[begin:end]``, and by part what was."""
    total = most = 0
    at = begin
    for index, (_, size) in enumerate(events[:end]):
        total += size
        if index >= begin and total > most:
            most, at = total, index
    return most, alive(events, at + 1)


def alive(events: list[tuple[Held, int]], end: int) -> dict[str, int]:
    """By part, the bytes alive after ``events[:end]``."""
    parts = dict.fromkeys(PARTS, 0)
    for held, size in events[:end]:
        parts[held.part] += size
    return parts


def strided(tensors: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors among ``tensors``; of a DTensor what this rank holds."""
    for tensor in tensors:
        if isinstance(tensor, Tensor):
            yield local(tensor)
