"""Change what a module does by giving the instance a subclass: names, ties, deepcopy, pickle and compile keep working.

A hook cannot enter a context for the forward and be compiled; a patched ``.forward`` stays bound to the original after
``deepcopy``; a wrapper module changes parameter names. A subclass does none of that.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from functools import cache, wraps
from typing import Any, cast

from torch import nn


class Swapped:
    """Mix-in of every swapped class: it looks like its base, and pickles as base plus mix-in."""

    lmp_mixin: type[Swapped]
    lmp_base: type[nn.Module]
    #: attributes of the instance that go with the mix-in
    lmp_state: tuple[str, ...] = ()

    def __reduce_ex__(self, protocol: Any) -> Any:
        # The class was made at run time and cannot be found by name: rebuild it from those that can.
        get_state = getattr(type(self), "__getstate__", None)
        default = get_state is None or get_state is getattr(object, "__getstate__", None)
        state = self.__dict__.copy() if default else cast("Any", self).__getstate__()
        mixins, base = _layers(type(self))
        return _rebuild, (mixins, base), state


class OwnForward(Swapped):
    """Runs the ``forward`` that was set on the instance (by Liger's patches, or ``torch.compile(module.forward)``)."""

    _lmp_forward: Callable[..., Any]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What was set, else the class's own."""
        own = self.__dict__.get("_lmp_forward")
        return cast("Any", super()).forward(*args, **kwargs) if own is None else own(*args, **kwargs)


def _anchor(base: type[nn.Module]) -> tuple[type, ...]:
    """What comes first among the bases of a class over ``base``, for an instance of ``base`` to change to it.

    CPython compares where the instances' ``__dict__`` comes from: ``class Net(ABC, nn.Module)``, or ``Generic[T]``, has
    one of its own, below a class that has none.
    """
    root: type = base
    while root.__base__ is not None and root.__base__.__dictoffset__:
        root = root.__base__
    above: Any = root.__base__
    # Generic takes no subclass that does not name its parameters
    return () if above is object else (type(above)("Anchor", (above,), {"__orig_bases__": ()}),)


@cache
def _swapped_class(mixin: type[Swapped], base: type[nn.Module]) -> type[nn.Module]:
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return cast("Any", mixin).forward(self, *args, **kwargs)

    namespace = {
        "forward": wraps(base.forward)(forward),  # code that inspects the signature sees the module's own
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
        "lmp_mixin": mixin,
        "lmp_base": base,
    }
    return cast("type[nn.Module]", type(base.__name__, (*_anchor(base), mixin, base), namespace))


def _layers(cls: Any) -> tuple[tuple[type[Swapped], ...], type[nn.Module]]:
    """The mix-ins of a swapped class, innermost first, and the class they were swapped over."""
    mixins: list[type[Swapped]] = []
    while issubclass(cls, Swapped):
        mixins.append(cls.lmp_mixin)
        cls = cls.lmp_base
    return tuple(reversed(mixins)), cls


def _combined(mixins: Iterable[type[Swapped]], base: type[nn.Module]) -> type[nn.Module]:
    for mixin in mixins:
        base = _swapped_class(mixin, base)
    return base


def _rebuild(mixins: tuple[type[Swapped], ...], base: type[nn.Module]) -> nn.Module:
    cls = _combined(mixins, base)
    return cls.__new__(cls)


def original_class(module: nn.Module) -> type[nn.Module]:
    """The class of ``module`` before anything was swapped in, here or by ``fully_shard``."""
    cls = type(module)
    while True:
        if issubclass(cls, Swapped):
            cls = _layers(cls)[1]
        elif len(cls.__bases__) == 2 and cls.__bases__[0].__name__ == "FSDPModule":
            cls = cast("type[nn.Module]", cls.__bases__[1])
        else:
            return cls


def swap_in(module: nn.Module, mixin: type[Swapped], *, innermost: bool = False, **state: Any) -> None:
    """Make ``module`` an instance of ``mixin`` over its present class, or below all that was swapped in.

    ``state`` are attributes of the instance.
    """
    vars(module).update(state)
    if isinstance(module, mixin):
        return
    if "forward" in vars(module) and mixin is not OwnForward:  # else it would be called in place of the class's
        vars(module)["_lmp_forward"] = vars(module).pop("forward")
        swap_in(module, OwnForward, innermost=True)
    mixins, base = _layers(type(module)) if innermost else ((), type(module))
    if mixins[:1] == (OwnForward,):
        mixins, mixin = (mixin, *mixins[1:]), OwnForward
    module.__class__ = _combined((mixin, *mixins), base)


def swap_out(module: nn.Module, mixin: type[Swapped]) -> None:
    """Take ``mixin`` and its state out again, whatever was swapped in around it.

    Where ``fully_shard`` put a class of its own on top since, the mix-in stays below it: without state it does nothing.
    """
    for name in mixin.lmp_state:
        vars(module).pop(name, None)
    if "lmp_mixin" not in vars(type(module)):
        return
    mixins, base = _layers(type(module))
    left = [layer for layer in mixins if layer is not mixin]
    if left == [OwnForward]:
        left = []
        vars(module)["forward"] = vars(module).pop("_lmp_forward")
    module.__class__ = _combined(left, base)


@contextmanager
def original_classes(root: nn.Module) -> Generator[None, None, None]:
    """Within, every module is of the class that its author wrote: ``type(module) is nn.LayerNorm`` holds."""
    swapped = [(module, type(module)) for module in root.modules() if original_class(module) is not type(module)]
    for module, _ in swapped:
        module.__class__ = original_class(module)
    try:
        yield
    finally:
        for module, cls in swapped:
            module.__class__ = cls


def call_with_original_classes(root: nn.Module, method: str) -> Callable[[], None]:
    """Have the next call of a method of ``root`` see the original classes; what is returned ends that, too."""
    own, run = vars(root).get(method), getattr(root, method)
    if hasattr(own, "lmp_once"):  # of another callback
        return lambda: None

    def restore() -> None:
        vars(root).pop(method, None)
        if own is not None:
            vars(root)[method] = own

    def once(*args: Any, **kwargs: Any) -> Any:
        restore()
        with original_classes(root):
            return run(*args, **kwargs)

    cast("Any", once).lmp_once = True
    vars(root)[method] = once
    return restore
