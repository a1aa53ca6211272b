"""Which modules a pattern means, by name and class, and the swap of a class that changes what a module does.

The one place where names are matched, and where a class is the one that the author wrote, whatever was swapped in.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from functools import cache, wraps
from typing import Any, cast

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import is_parametrized

from lightning_mp.compat.torch import WRAPPERS
from lightning_mp.errors import Faults, did_you_mean

#: the word for every normalization; also a pattern like any other
NORMS = "norms"
#: in the name of a class: not those that normalize weights, as weight_norm does, or inputs, as transforms do
_NORM = re.compile(r"(?<!Weight)(?<!Spectral)Norm(?!aliz)")


def is_norm(module: nn.Module) -> bool:
    """Whether the module is a LayerNorm, BatchNorm, GroupNorm or RMSNorm of any class: one that only normalizes."""
    named = any(_NORM.search(cls.__name__) for cls in original_class(module).__mro__)
    own = sum(1 for _ in module.parameters(recurse=False)) + sum(1 for _ in module.buffers(recurse=False))
    if not named or not (own or original_class(module).__module__.startswith("torch.nn.")):
        return False
    return all(is_norm(child) or next(child.parameters(), None) is None for child in module.children())


def matches(pattern: str, name: str, module: nn.Module) -> bool:
    """Whether ``pattern`` means the module: by its name, a dotted suffix of it, or its class (case-sensitive fnmatch).

    The word ``norms`` means every normalization too.
    """
    if pattern == NORMS and is_norm(module):
        return True
    parts, kind = name.split("."), original_class(module).__name__
    suffixes = (".".join(parts[start:]) for start in range(len(parts)))
    # torch renames the class of a module whose weights are parametrized: Linear to ParametrizedLinear
    plain = kind.removeprefix("Parametrized") if is_parametrized(module) else kind
    return any(fnmatchcase(word, pattern) for word in (*suffixes, kind, plain))


def named_submodules(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Every module below ``root`` under every one of its names, in definition order."""
    for name, module in root.named_modules(remove_duplicate=False):
        if name:
            yield name, module


#: the name of a module, itself, and the name of a parameter in it
Place = tuple[str, nn.Module, str]


def owners(root: nn.Module) -> dict[int, list[Place]]:
    """``id`` of every parameter → all places it is reached by, those of the root itself under the name ``""``."""
    found: dict[int, list[Place]] = {}
    for name, module in root.named_modules(remove_duplicate=False):
        for key, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            found.setdefault(id(parameter), []).append((name, module, key))
    return found


def has_own_forward(module: nn.Module) -> bool:
    """Whether calling the module means anything; a ``ModuleList`` only holds others."""
    return _forward(module) is not nn.Module.forward


def _forward(module: nn.Module) -> Any:
    return None if isinstance(module, torch.jit.ScriptModule) else original_class(module).forward


def called_in(module: nn.Module, *, through_sequential: bool = False) -> Iterator[nn.Module]:
    """The module itself where it has a forward; else the outermost below it that have one.

    ``through_sequential``: what is in a ``Sequential``, which is called however that one is used.
    """
    if has_own_forward(module) and not (through_sequential and _forward(module) is nn.Sequential.forward):
        yield module
        return
    for child in module.children():
        yield from called_in(child, through_sequential=through_sequential)


def not_scripted(name: str, module: nn.Module, what: str, faults: Faults) -> None:
    """Note that ``module``, whose forward is to be replaced, is compiled by ``torch.jit``, which never calls it."""
    if isinstance(module, torch.jit.ScriptModule):
        faults.add(f"{what} on {name!r}, which torch.jit compiled", fix="leave it out, or script it after training")


def not_lazy(name: str, module: nn.Module, what: str, faults: Faults) -> None:
    """Note that ``module`` itself has parameters that its first forward will make, as it changes its class."""
    if any(map(is_lazy, (*module.parameters(recurse=False), *module.buffers(recurse=False)))):
        faults.add(f"{what} on {name!r}, whose parameters do not exist yet", fix="run one batch through it first")


def no_match(pattern: str, root: nn.Module, what: str, faults: Faults) -> None:
    """Note that ``pattern`` matches nothing in ``root``, with the names most like it."""
    words = dict.fromkeys(
        word
        for name, module in named_submodules(root)
        for word in (name.rpartition(".")[2], original_class(module).__name__, name)
    )
    here = f"choose among the modules here: {', '.join(list(words)[:5])}"
    fix = did_you_mean(pattern.strip("*."), [NORMS, *words], here)
    faults.add(f"{what} {pattern!r}, which matches no module", fix=fix)


def plain_name(name: str) -> str:
    """``name`` without the parts that FSDP, ``torch.compile``, Fabric and checkpoint wrappers put into it."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


# ------------------------------------------------------------------ the swap of a class

# The instance is given a subclass: names, ties, deepcopy, pickle and compile keep working. A hook cannot enter a
# context for the forward and be compiled; a patched ``.forward`` stays bound to the original after ``deepcopy``; a
# wrapper module changes parameter names.


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
