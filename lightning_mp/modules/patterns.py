"""Which modules a pattern means, by name and class, and the swap of a class that changes what a module does."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from fnmatch import fnmatchcase
from functools import cache, reduce, wraps
from types import FunctionType
from typing import Any, cast

import torch
from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import is_parametrized

from lightning_mp.compat.torch import WRAPPERS
from lightning_mp.errors import Faults, did_you_mean
from lightning_mp.numerics.dtypes import is_plain

#: the word for every normalization; also a pattern like any other
NORMS = "norms"
#: in the name of a class: not those that normalize weights, as weight_norm does, or inputs, as transforms do
_NORM = re.compile(r"(?<!Weight)(?<!Spectral)Norm(?!aliz)")


def is_norm(module: nn.Module) -> bool:
    """Whether the module is a LayerNorm, BatchNorm, GroupNorm or RMSNorm of any class: one that only normalizes."""
    cls = original_class(module)
    owns = any(True for _ in (*module.parameters(recurse=False), *module.buffers(recurse=False)))
    if not (owns or cls.__module__.startswith("torch.nn.")) or not any(_NORM.search(c.__name__) for c in cls.__mro__):
        return False
    return all(is_norm(child) or next(child.parameters(), None) is None for child in module.children())


def is_plain_linear(module: nn.Module) -> bool:
    """Whether calling it is what computes with its weight, one of torch's own, and as ``nn.Linear`` does."""
    cls, weight = original_class(module), cast("nn.Parameter", getattr(module, "weight", None))
    # an attention reads the weight of its output projection without calling it
    if cls.forward is not nn.Linear.forward or issubclass(cls, NonDynamicallyQuantizableLinear) or is_lazy(weight):
        return False
    return "forward" not in vars(module) and (is_plain(weight) or hasattr(weight, "to_local"))


def matches(pattern: str, name: str, module: nn.Module) -> bool:
    """Whether ``pattern`` means the module: ``norms``, or fnmatch of its class, its name or a dotted suffix of it."""
    if pattern == NORMS and is_norm(module):
        return True
    parts, cls = name.split("."), original_class(module).__name__
    words = [cls, *(".".join(parts[start:]) for start in range(len(parts)))]
    if is_parametrized(module):  # torch renames the class: Linear to ParametrizedLinear
        words.append(cls.removeprefix("Parametrized"))
    return any(fnmatchcase(word, pattern) for word in words)


def named_submodules(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Every module below ``root`` under every one of its names, in definition order."""
    for name, module in root.named_modules(remove_duplicate=False):
        if name:
            yield name, module


#: the name of a module, itself, and the name of a parameter in it
Place = tuple[str, nn.Module, str]


def owners(root: nn.Module) -> dict[int, list[Place]]:
    """``id`` of every parameter → all places it is reached by, those of the root itself under the name ``""``."""
    places: dict[int, list[Place]] = {}
    for name, module in root.named_modules(remove_duplicate=False):
        for key, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            places.setdefault(id(parameter), []).append((name, module, key))
    return places


def has_own_forward(module: nn.Module) -> bool:
    """Whether calling the module means anything; a ``ModuleList`` only holds others."""
    return _forward(module) is not nn.Module.forward


def _forward(module: nn.Module) -> Any:
    return None if isinstance(module, torch.jit.ScriptModule) else original_class(module).forward


def called_in(module: nn.Module, *, through_sequential: bool = False) -> Iterator[nn.Module]:
    """What has a forward: the module, else the outermost below it; of a ``Sequential``, what is in it, where asked."""
    if has_own_forward(module) and not (through_sequential and _forward(module) is nn.Sequential.forward):
        yield module
        return
    for child in module.children():
        yield from called_in(child, through_sequential=through_sequential)


def check_changeable(name: str, module: nn.Module, what: str, faults: Faults) -> None:
    """Note why the class of ``module`` cannot be swapped: compiled by ``torch.jit``, or its parameters are lazy."""
    if isinstance(module, torch.jit.ScriptModule):
        faults.add(f"{what} on {name!r}, which torch.jit compiled", fix="leave it out, or script it after training")
    elif any(map(is_lazy, (*module.parameters(recurse=False), *module.buffers(recurse=False)))):
        faults.add(f"{what} on {name!r}, whose parameters do not exist yet", fix="run one batch through it first")


def covering(
    root: nn.Module, patterns: Sequence[str], what: str, faults: Faults, may_miss: Sequence[str] = ()
) -> tuple[dict[str, int], set[int]]:
    """Module name → index of the first pattern that matches it or something above it; and which match anything.

    Those that match nothing are noted as ``what``, but for what ``may_miss``: a kind, or what is usual in a model.
    """
    index_of, matched = dict[str, int](), set[int]()
    for name, module in named_submodules(root):
        own = [index for index, pattern in enumerate(patterns) if matches(pattern, name, module)]
        matched.update(own)
        above = index_of.get(name.rpartition(".")[0])
        candidates = own if above is None else [*own, above]
        if candidates:
            index_of[name] = min(candidates)
    for index, pattern in enumerate(patterns):
        if index not in matched and pattern not in may_miss:
            no_match(pattern, root, what, faults)
    return index_of, matched


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

    #: what was swapped in, innermost first, over which class
    lmp_mixins: tuple[type[Swapped], ...]
    lmp_base: type[nn.Module]
    #: attributes of the instance that go with the mix-in
    lmp_state: tuple[str, ...] = ()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own, innermost: what was set on the instance, as Liger does, else its class's."""
        own = self.__dict__.get("_lmp_forward")
        return cast("Any", super()).forward(*args, **kwargs) if own is None else own(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # The class was made at run time and cannot be found by name: rebuild it from those that can.
        return _rebuild, _layers(type(self)), cast("Any", super().__reduce_ex__(2))[2]


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
    forward, (layers, original) = cast("FunctionType", mixin.forward), _layers(base)
    own = FunctionType(forward.__code__, forward.__globals__, closure=forward.__closure__)
    namespace = {
        "forward": wraps(base.forward)(own),  # code that inspects the signature sees the module's own
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
        "lmp_mixins": (*layers, mixin),
        "lmp_base": original,
    }
    return cast("type[nn.Module]", type(base.__name__, (*_anchor(base), mixin, base), namespace))


def _layers(cls: type) -> tuple[tuple[type[Swapped], ...], type[nn.Module]]:
    return getattr(cls, "lmp_mixins", ()), getattr(cls, "lmp_base", cls)


def _combined(mixins: Iterable[type[Swapped]], base: type[nn.Module]) -> type[nn.Module]:
    return reduce(lambda below, mixin: _swapped_class(mixin, below), mixins, base)


def _rebuild(mixins: tuple[type[Swapped], ...], base: type[nn.Module]) -> nn.Module:
    cls = _combined(mixins, base)
    return cls.__new__(cls)


def original_class(module: nn.Module) -> type[nn.Module]:
    """The class of ``module`` before anything was swapped in, here or by ``fully_shard``."""
    cls = type(module)
    while True:
        if issubclass(cls, Swapped):
            cls = cls.lmp_base
        elif len(cls.__bases__) == 2 and cls.__bases__[0].__name__ == "FSDPModule":
            cls = cast("type[nn.Module]", cls.__bases__[1])
        else:
            return cls


def swap_in(module: nn.Module, mixin: type[Swapped], *, innermost: bool = False, **state: Any) -> None:
    """Make ``module`` one of ``mixin`` over its present class, or below all others; ``state`` are its attributes."""
    vars(module).update(state)
    if isinstance(module, mixin):
        return
    if "forward" in vars(module):  # else it would be called in place of the class's
        vars(module)["_lmp_forward"] = vars(module).pop("forward")
    mixins, base = _layers(type(module)) if innermost else ((), type(module))
    module.__class__ = _combined((mixin, *mixins), base)


def swap_out(module: nn.Module, mixin: type[Swapped]) -> None:
    """Take ``mixin`` and its state out again, whatever was swapped in around it.

    Where ``fully_shard`` put a class of its own on top since, the mix-in stays below it: without state it does nothing.
    """
    for name in mixin.lmp_state:
        vars(module).pop(name, None)
    if "lmp_mixins" not in vars(type(module)):
        return
    mixins, base = _layers(type(module))
    left = [layer for layer in mixins if layer is not mixin]
    if not left and "_lmp_forward" in vars(module):
        vars(module)["forward"] = vars(module).pop("_lmp_forward")
    module.__class__ = _combined(left, base)


def swap_all(modules: Iterable[nn.Module], mixin: type[Swapped], **options: Any) -> Callable[[], None]:
    """:func:`swap_in` for each of ``modules``; calling the result swaps them out again."""
    undo = ExitStack()
    for module in modules:
        swap_in(module, mixin, **options)
        undo.callback(swap_out, module, mixin)
    return undo.close


def call_with_original_classes(root: nn.Module, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call ``run`` while every module is of the class that its author wrote: ``type(module) is nn.LayerNorm`` holds."""
    swapped = [(module, type(module)) for module in root.modules() if original_class(module) is not type(module)]
    try:
        for module, _ in swapped:
            module.__class__ = original_class(module)
        return run(*args, **kwargs)
    finally:
        for module, cls in swapped:
            module.__class__ = cls
