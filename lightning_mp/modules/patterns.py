"""Match patterns to modules by name and class, and swap a module's class to change its forward."""

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

#: the pattern for every normalization layer
NORMS = "norms"
#: matches the class name of a norm; weight_norm normalizes weights, and transforms normalize inputs
_NORM = re.compile(r"(?<!Weight)(?<!Spectral)Norm(?!aliz)")


def is_norm(module: nn.Module) -> bool:
    """True if the module is a LayerNorm, BatchNorm, GroupNorm or RMSNorm of any class.

    Its class's name decides. Outside of torch.nn it must have tensors of its own. Every
    child must be a norm too, or have no parameters.
    """
    cls = original_class(module)
    owns = any(True for _ in (*module.parameters(recurse=False), *module.buffers(recurse=False)))
    if not (owns or cls.__module__.startswith("torch.nn.")) or not any(_NORM.search(c.__name__) for c in cls.__mro__):
        return False
    return all(is_norm(child) or next(child.parameters(), None) is None for child in module.children())


def is_plain_linear(module: nn.Module) -> bool:
    """True if the module's forward is ``nn.Linear``'s, and its weight an ordinary or sharded tensor.

    A forward that was set on the instance, and an attention's output projection, do not qualify.
    """
    cls, weight = original_class(module), cast("nn.Parameter", getattr(module, "weight", None))
    # MultiheadAttention reads the weight of its output projection without calling the module
    if cls.forward is not nn.Linear.forward or issubclass(cls, NonDynamicallyQuantizableLinear) or is_lazy(weight):
        return False
    return "forward" not in vars(module) and (is_plain(weight) or hasattr(weight, "to_local"))


def matches(pattern: str, name: str, module: nn.Module) -> bool:
    """True if ``pattern`` matches the module.

    ``norms`` matches every norm. Any pattern also matches by ``fnmatchcase``: the class's name,
    ``name``, or a suffix of ``name`` that begins after a dot. The class of a parametrized module
    has two names, with and without ``Parametrized``.
    """
    if pattern == NORMS and is_norm(module):
        return True
    parts, cls = name.split("."), original_class(module).__name__
    words = [cls, *(".".join(parts[start:]) for start in range(len(parts)))]
    if is_parametrized(module):  # torch renames the class: Linear to ParametrizedLinear
        words.append(cls.removeprefix("Parametrized"))
    return any(fnmatchcase(word, pattern) for word in words)


def named_submodules(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield every module below ``root`` in definition order; a shared module once for each of its names."""
    for name, module in root.named_modules(remove_duplicate=False):
        if name:
            yield name, module


#: a module's name, the module, and the name of a parameter in it
Place = tuple[str, nn.Module, str]


def owners(root: nn.Module) -> dict[int, list[Place]]:
    """Return all places of each parameter by its ``id``. The root's own name is ``""``."""
    places: dict[int, list[Place]] = {}
    for name, module in root.named_modules(remove_duplicate=False):
        for key, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            places.setdefault(id(parameter), []).append((name, module, key))
    return places


def has_own_forward(module: nn.Module) -> bool:
    """True if the module defines a forward. A ``ModuleList`` does not."""
    return _forward(module) is not nn.Module.forward


def _forward(module: nn.Module) -> Any:
    return None if isinstance(module, torch.jit.ScriptModule) else original_class(module).forward


def called_in(module: nn.Module, *, through_sequential: bool = False) -> Iterator[nn.Module]:
    """Yield the module if it has a forward, else the outermost modules below it that have one.

    With ``through_sequential``, a ``Sequential`` counts as if it had no forward.
    """
    if has_own_forward(module) and not (through_sequential and _forward(module) is nn.Sequential.forward):
        yield module
        return
    for child in module.children():
        yield from called_in(child, through_sequential=through_sequential)


def check_changeable(name: str, module: nn.Module, what: str, faults: Faults) -> None:
    """Add a fault if the class of ``module`` cannot be swapped.

    It cannot if ``torch.jit`` compiled it, or its parameters or buffers are lazy. ``what`` names
    the option in the message.
    """
    if isinstance(module, torch.jit.ScriptModule):
        faults.add(f"{what} on {name!r}, which torch.jit compiled", fix="leave it out, or script it after training")
    elif any(map(is_lazy, (*module.parameters(recurse=False), *module.buffers(recurse=False)))):
        faults.add(f"{what} on {name!r}, whose parameters do not exist yet", fix="run one batch through it first")


def covering(
    root: nn.Module, patterns: Sequence[str], what: str, faults: Faults, may_miss: Sequence[str] = ()
) -> tuple[dict[str, int], set[int]]:
    """Return the index of the pattern that covers each module, by name, and the indices that match any.

    A module is covered by the first pattern that matches it or a module above it. Modules that no
    pattern covers are left out. A fault is added for each pattern that matches no module, except
    for those in ``may_miss``. ``what`` names the option in the message.
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
    """Add a fault: ``pattern`` matches no module below ``root``. The fix names similar modules."""
    words = dict.fromkeys(
        word
        for name, module in named_submodules(root)
        for word in (name.rpartition(".")[2], original_class(module).__name__, name)
    )
    here = f"choose among the modules here: {', '.join(list(words)[:5])}"
    fix = did_you_mean(pattern.strip("*."), [NORMS, *words], here)
    faults.add(f"{what} {pattern!r}, which matches no module", fix=fix)


def plain_name(name: str) -> str:
    """Return ``name`` without the parts that FSDP, ``torch.compile``, Fabric and checkpoint wrappers add."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


# ------------------------------------------------------------------ swapping a class

# The instance's class becomes a subclass: names, ties, deepcopy, pickle and compile keep working.
# A hook that enters a context for the forward cannot be compiled. A patched ``.forward`` stays
# bound to the original after ``deepcopy``. A wrapper module changes parameter names.


class Swapped:
    """The base of all mix-ins. A swapped class has its base's name, and pickles as base plus mix-ins."""

    #: the mix-ins, innermost first, and the original class
    lmp_mixins: tuple[type[Swapped], ...]
    lmp_base: type[nn.Module]
    #: attributes of the instance that ``swap_out`` removes with the mix-in
    lmp_state: tuple[str, ...] = ()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward that was set on the instance, as Liger does, else the original class's."""
        own = self.__dict__.get("_lmp_forward")
        return cast("Any", super()).forward(*args, **kwargs) if own is None else own(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # pickle finds no class that was made at run time, so it is rebuilt from its parts
        return _rebuild, _layers(type(self)), cast("Any", super().__reduce_ex__(2))[2]


def _anchor(base: type[nn.Module]) -> tuple[type, ...]:
    """Return the first bases of a subclass of ``base``, so that an instance's ``__class__`` may become it.

    CPython allows the change only if both classes get the instance's ``__dict__`` from the same
    place. In ``class Net(ABC, nn.Module)``, or with ``Generic[T]``, the first base has no
    ``__dict__``, and a new subclass of it has to come first. For other classes the result is empty.
    """
    root: type = base
    while root.__base__ is not None and root.__base__.__dictoffset__:
        root = root.__base__
    above: Any = root.__base__
    # Generic refuses a subclass without __orig_bases__
    return () if above is object else (type(above)("Anchor", (above,), {"__orig_bases__": ()}),)


@cache
def _swapped_class(mixin: type[Swapped], base: type[nn.Module]) -> type[nn.Module]:
    """Return the subclass of ``base`` with ``mixin``, always the same class for the same two."""
    forward, (layers, original) = cast("FunctionType", mixin.forward), _layers(base)
    own = FunctionType(forward.__code__, forward.__globals__, closure=forward.__closure__)
    namespace = {
        "forward": wraps(base.forward)(own),  # so that inspect shows the module's own signature
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
    """Return the class of ``module`` without mix-ins of this package and of ``fully_shard``."""
    cls = type(module)
    while True:
        if issubclass(cls, Swapped):
            cls = cls.lmp_base
        elif len(cls.__bases__) == 2 and cls.__bases__[0].__name__ == "FSDPModule":
            cls = cast("type[nn.Module]", cls.__bases__[1])
        else:
            return cls


def swap_in(module: nn.Module, mixin: type[Swapped], *, innermost: bool = False, **state: Any) -> None:
    """Change the class of ``module`` to a subclass with ``mixin``, and set ``state`` as attributes.

    The mix-in's forward runs around the forwards of other mix-ins, or with ``innermost`` within
    them. If the module has the mix-in already, only the attributes are updated.
    """
    vars(module).update(state)
    if isinstance(module, mixin):
        return
    if "forward" in vars(module):  # an instance's forward would hide the class's
        vars(module)["_lmp_forward"] = vars(module).pop("forward")
    mixins, base = _layers(type(module)) if innermost else ((), type(module))
    module.__class__ = _combined((mixin, *mixins), base)


def swap_out(module: nn.Module, mixin: type[Swapped]) -> None:
    """Remove ``mixin`` and its state from ``module``. Other mix-ins stay.

    If ``fully_shard`` has swapped in its own class since, only the state is removed. Without state
    the mix-in does nothing.
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
    """Call :func:`swap_in` for each of ``modules``, and return a function that undoes it."""
    undo = ExitStack()
    for module in modules:
        swap_in(module, mixin, **options)
        undo.callback(swap_out, module, mixin)
    return undo.close


def call_with_original_classes(root: nn.Module, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return ``run(*args, **kwargs)``, called while all modules below ``root`` have their original class.

    A check such as ``type(module) is nn.LayerNorm`` then works. The mix-ins do nothing meanwhile.
    """
    swapped = [(module, type(module)) for module in root.modules() if original_class(module) is not type(module)]
    try:
        for module, _ in swapped:
            module.__class__ = original_class(module)
        return run(*args, **kwargs)
    finally:
        for module, cls in swapped:
            module.__class__ = cls
