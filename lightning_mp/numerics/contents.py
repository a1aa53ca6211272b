"""``Contents``, which restores tensors, arrays, generators, containers and simple objects."""

import random
import sys
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial
from types import FunctionType, MethodType, ModuleType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from lightning_mp.compat.torch import TorchDispatchMode, overwritten
from lightning_mp.numerics.grads import local

_CONTAINERS = (list, dict, set, deque)
#: values that are never noted: the caller restores their state, or a step does not change it
_LEFT_OUT = (nn.Module, nn.Parameter, Dataset, type, FunctionType, MethodType, ModuleType)


class Contents:
    """A record of the contents of values at the time of ``note``.

    ``restore`` writes only changed values, because a tensor's memory may be a read-only map.
    """

    def __init__(self) -> None:
        self._undo = ExitStack()
        #: the noted values by ``id``; a reference to each keeps Python from reusing its id
        self._noted: dict[int, Any] = {}

    def restore(self) -> None:
        """Restore all values, and forget them.

        If restoring a value raises, the others are still restored, and the error is raised at the
        end.
        """
        self._noted.clear()
        self._undo.close()

    def note(self, value: Any, package: str = "") -> None:
        """Note the contents of ``value``, unless they are noted already.

        Tensors, numpy arrays and random generators are noted. A list, dict, set, deque or tuple is
        noted with its items. An object whose class is in the top-level ``package`` is noted with
        its attributes. Objects among those attributes are not. Any other value is left out, as are
        modules, parameters, datasets, and tensors in inference mode or on the meta device.
        """
        if id(value) in self._noted or isinstance(value, _LEFT_OUT):
            return
        self._noted[id(value)] = value
        undo = self._undo_of(value, package)
        if undo is not None:
            self._undo.callback(undo)

    def note_entries(self, entries: dict[str, Any], leave: Iterable[str] = (), package: str = "") -> None:
        """Note the entries of a dict and their contents, except the names in ``leave``.

        ``restore`` then also deletes entries that were added since.
        """
        noted = {name: value for name, value in entries.items() if name not in leave}
        for value in noted.values():
            self.note(value, package)
        self._undo.callback(_restore_entries, entries, noted, leave)

    def _undo_of(self, value: Any, package: str) -> Callable[[], object] | None:
        """Note the items of ``value``, and return a function that restores ``value`` itself.

        ``None`` is returned if ``value`` itself needs no restoring, or is left out.
        """
        if isinstance(value, Tensor):
            return self._note_tensor(value)
        if isinstance(value, _CONTAINERS):
            return self._note_container(value, package)
        if isinstance(value, tuple):
            for item in cast("tuple[Any, ...]", value):
                self.note(item, package)
            return None
        if package and package_of(value) == package and hasattr(value, "__dict__"):
            return self._note_container(vars(value), "")  # no package: objects among the attributes are left out
        return _undo_of_leaf(value)

    def _note_tensor(self, tensor: Tensor) -> Callable[[], object] | None:
        flatten: Any = getattr(tensor, "__tensor_flatten__", None)
        if flatten is not None:  # a DTensor, or another class that wraps tensors
            for name in flatten()[0]:
                self.note(getattr(tensor, name))
            return None
        if tensor.is_inference() or tensor.is_meta:
            return None
        memory = _without_overlap(tensor.detach())
        return partial(_restore_tensor, memory, memory.clone())

    def _note_container(self, container: Any, package: str) -> Callable[[], object]:
        before: Any = dict(container) if isinstance(container, dict) else list(container)
        for item in before.values() if isinstance(container, dict) else before:
            self.note(item, package)
        return partial(_restore_container, container, before)


def package_of(value: object) -> str:
    """Return the top-level package of the value's class, or ``""`` for torch and builtins."""
    package = type(value).__module__.partition(".")[0]
    return "" if package in ("torch", "builtins") else package


def _without_overlap(tensor: Tensor) -> Tensor:
    """Return ``tensor``, or a flat view of its memory if elements overlap (``expand``, ``unfold``)."""
    if tensor.layout is not torch.strided or not tensor.numel():
        return tensor
    last = 0
    overlaps = False
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            overlaps = overlaps or stride <= last
            last += stride * (size - 1)
    return tensor.as_strided((last + 1,), (1,)) if overlaps else tensor


def _restore_tensor(tensor: Tensor, before: Tensor) -> None:
    # The version counter cannot show a change: batch norm writes its statistics without counting.
    with torch.no_grad():
        if not _has_equal_bits(tensor, before):
            tensor.copy_(before)


def _has_equal_bits(tensor: Tensor, other: Tensor) -> bool:
    """True if all bits are equal. False also for tensors that are sparse or quantized."""
    if tensor.layout is not torch.strided or tensor.is_quantized:
        return False
    return torch.equal(*(one.resolve_conj().resolve_neg().reshape(-1).view(torch.uint8) for one in (tensor, other)))


def _undo_of_leaf(value: Any) -> Callable[[], object] | None:
    """Return a function that restores a numpy array, or a generator of torch, Python or numpy.

    ``None`` is returned for any other value.
    """
    if isinstance(value, torch.Generator):
        return partial(value.set_state, value.get_state())
    if isinstance(value, random.Random):
        return partial(value.setstate, value.getstate())
    numpy: Any = sys.modules.get("numpy")
    return None if numpy is None else _undo_of_numpy(numpy, value)


def _undo_of_numpy(numpy: Any, value: Any) -> Callable[[], object] | None:
    if isinstance(value, numpy.ndarray):
        return partial(_restore_array, value, value.copy())
    if isinstance(value, numpy.random.Generator):
        return partial(setattr, value.bit_generator, "state", value.bit_generator.state)
    if isinstance(value, numpy.random.RandomState):
        return partial(value.set_state, value.get_state())
    return None


def _restore_array(array: Any, before: Any) -> None:
    if array.tobytes() != before.tobytes():
        array[...] = before


def _restore_container(container: Any, before: Any) -> None:
    if isinstance(container, dict):
        now: Any = dict(container)
        unchanged = _ids(now) == _ids(before) and _ids(now.values()) == _ids(before.values())
    else:
        unchanged = _ids(container) == _ids(before)
    if not unchanged:
        container.clear()
        (container.extend if isinstance(container, (list, deque)) else container.update)(before)


def _ids(values: Iterable[Any]) -> list[int]:
    return list(map(id, values))


def _restore_entries(entries: dict[str, Any], noted: dict[str, Any], leave: Iterable[str]) -> None:
    """Make ``entries`` equal to ``noted``, except the names in ``leave``."""
    for name in [name for name in entries if name not in noted and name not in leave]:
        del entries[name]
    entries.update(noted)


class RestoredParameters(TorchDispatchMode):
    """A context that notes parameters in ``contents`` before an operator overwrites them.

    A step may write to parameters, as an EMA teacher does in ``training_step``. Only the
    overwritten region is copied. The region of a sharded parameter is within this rank's shard.
    """

    def __init__(self, parameters: Iterable[Tensor], contents: Contents) -> None:
        super().__init__()
        self._contents = contents
        self._storages = {_address(parameter) for parameter in parameters} - {0}
        self._written: set[Any] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in overwritten(func, args, kwargs or {}):
            if isinstance(tensor, Tensor) and _address(tensor) in self._storages:
                view = local(tensor).detach()
                region = view.data_ptr(), view.shape, view.stride()
                if region not in self._written:
                    self._written.add(region)
                    self._contents.note(view)
        return func(*args, **(kwargs or {}))


def _address(tensor: Tensor) -> int:
    """Return the address of the tensor's storage, of a sharded tensor the shard's.

    0 is returned for meta and sparse tensors, and for subclasses that wrap others.
    """
    shard = local(tensor)
    if shard.is_meta or shard.layout is not torch.strided or hasattr(shard, "__tensor_flatten__"):
        return 0
    return shard.untyped_storage().data_ptr()


def restore_data(parameters: Iterable[Tensor]) -> Callable[[], None]:
    """Return a function that undoes later assignments to ``parameter.data``."""
    before = [(parameter, parameter.data) for parameter in parameters]

    def restore() -> None:
        for parameter, data in before:
            if _address(parameter) != _address(data):
                parameter.data = data

    return restore
