"""Module-level dtypes: match pins to modules, cast tensors, and run each module in its pin's dtype."""

import re
import threading
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import wraps
from itertools import chain
from typing import Any, cast

import torch
from torch import Tensor, nn

from lightning_mp.compat.torch import (
    apply_takes_recurse,
    apply_to_tensors,
    children_of,
    has_own_apply,
    unsaved_buffers,
)
from lightning_mp.compat.transformers import is_rotary, kept_in_fp32
from lightning_mp.errors import Faults, PlanError
from lightning_mp.modules import wide_linear
from lightning_mp.modules.patterns import (
    NORMS,
    Place,
    Swapped,
    check_changeable,
    covering,
    has_own_forward,
    named_submodules,
    original_class,
    owners,
    plain_name,
    swap_in,
    swap_out,
)
from lightning_mp.numerics.dtypes import (
    HALF,
    Cast,
    cast_,
    cast_within_range,
    castable,
    default_dtype,
    floating_dtype,
    to_torch,
    uncastable,
)
from lightning_mp.policy import Pin, PrecisionPolicy


@dataclass(frozen=True, slots=True)
class PinnedModule:
    """A module with the pin that covers it."""

    name: str
    module: nn.Module
    pin: Pin
    #: True if the nearest module above that has a forward is not covered by the same pin
    entry: bool
    #: the dtype of the nearest other pin around it, or None
    inside: str | None


@dataclass(frozen=True, slots=True)
class Declared:
    """A tensor that the model itself keeps in fp32.

    ``pattern`` is the entry of the model's list that names the tensor, or ``"rotary frequencies"``.
    ``model`` is the name of the model's class.
    """

    name: str
    module: nn.Module
    key: str
    pattern: str
    model: str

    @property
    def tensor(self) -> Tensor:
        """The present tensor. Sharding replaces it by another object."""
        return getattr(self.module, self.key)


@dataclass(frozen=True, slots=True)
class PinMap:
    """The modules that pins cover.

    ``shadowed`` are patterns that match modules, but earlier pins cover all of these.
    """

    members: tuple[PinnedModule, ...] = ()
    shadowed: tuple[str, ...] = ()
    #: tensors without a pin that the model itself keeps in fp32, if storage is in half precision
    declared: tuple[Declared, ...] = ()
    #: Linear layers with ``accumulate``: they sum in fp32, and are stored as if they had no pin
    wide: tuple[PinnedModule, ...] = ()

    @property
    def covered(self) -> tuple[PinnedModule, ...]:
        """The modules whose computation a pin changes."""
        return self.members + self.wide

    def dtypes(self) -> dict[int, str]:
        """Return the dtype of each parameter of a pinned module, and of each declared tensor, by ``id``.

        Quantized parameters, and the ``wide`` layers, are left out.
        """
        dtypes = {id(declared.tensor): "fp32" for declared in self.declared}
        for member in self.members:
            own = set(map(id, member.module.parameters(recurse=False))) - uncastable(member.module)
            dtypes |= dict.fromkeys(own, member.pin.dtype)
        return dtypes


def resolve(
    root: nn.Module, pins: Sequence[Pin], faults: Faults, storage: str = "fp32", buffers: str | None = None
) -> PinMap:
    """Return which of ``pins`` covers which module below ``root``. Nothing is changed.

    The first pin that covers a module counts. A pin also covers all modules below a match.
    ``storage`` is the dtype of parameters without a pin. ``buffers`` is the dtype that the user set
    for buffers, or ``None``.

    A fault is added if a pattern except ``norms`` matches nothing, a class cannot be swapped,
    ``accumulate`` is on a module that is no plain Linear, or pins on tied weights contradict one
    another.
    """
    if not pins:
        return PinMap(declared=_declared(root, storage, (), rotary=buffers is None))
    named = list(named_submodules(root))
    modules, wide = dict(named), list[PinnedModule]()
    index_of, matched = covering(root, [pin.pattern for pin in pins], "pin", faults, may_miss=[NORMS])
    shadowed = tuple(pins[index].pattern for index in sorted(matched.difference(index_of.values())))
    for name, module in named:
        if name in index_of and pins[index_of[name]].accumulate is not None:
            pin = pins[index_of.pop(name)]
            wide_linear.check(name, module, pin.pattern, faults)
            check_changeable(name, module, f"pin {pin.pattern!r}", faults)
            wide.append(PinnedModule(name, module, pin, True, None))
    _resolve_ties(owners(root).values(), index_of, pins, faults)
    members: dict[int, PinnedModule] = {}
    for name, module in named:
        index = index_of.get(name)
        if index is None or id(module) in members:
            continue
        callers = list(_called_above(name, modules))
        around = [index_of.get(caller) for caller in callers]
        outer = next((above for above in around if above != index), None)
        if not (callers and isinstance(modules[callers[0]], torch.jit.ScriptModule)):
            check_changeable(name, module, f"pin {pins[index].pattern!r}", faults)
        inside = None if outer is None else pins[outer].dtype
        members[id(module)] = PinnedModule(name, module, pins[index], around[:1] != [index], inside)
    pinned = [member.module for member in members.values()]
    declared = _declared(root, storage, pinned, rotary=buffers is None)
    return PinMap(tuple(members.values()), shadowed, declared, tuple(wide))


def _resolve_ties(tied: Iterable[list[Place]], index_of: dict[str, int], pins: Sequence[Pin], faults: Faults) -> None:
    """Extend ``index_of`` to the owners of tied weights, and add a fault if their pins contradict.

    If one owner has a pin, the other owners without one get it too. The root is excluded, and so is
    an owner that contains a pinned owner. ``index_of`` maps a module's name to its pin's index.
    """
    for places in tied:
        pinned = [name for name, _, _ in places if name in index_of]
        for name, _, _ in places if pinned else ():
            # BERT's head owns its decoder's bias too: a pin on the decoder is not one on the head
            if name and not any(owner.startswith(f"{name}.") for owner in pinned):
                index_of.setdefault(name, min(index_of[owner] for owner in pinned))
    for places in tied:
        dtypes = {f"{name}.{key}": pins[index_of[name]].dtype for name, _, key in places if name in index_of}
        if len(set(dtypes.values())) > 1:
            given = " and ".join(f"{place} pinned to {dtype}" for place, dtype in dtypes.items())
            fix = "pin both to the same dtype, or untie them (transformers: tie_word_embeddings=False)"
            faults.add(f"contradicting pins on tied weights: {given}", fix=fix)
        # the root itself is never pinned, so a weight that it owns could not keep a pin's dtype
        own = next((key for name, _, key in places if not name), None)
        if own is not None and dtypes:
            given = f"a pin on {next(iter(dtypes))}, which is tied to the root module's own {own!r}"
            faults.add(given, fix="let the root reach it through the module instead of owning the parameter itself")


def _called_above(name: str, modules: dict[str, nn.Module]) -> Iterator[str]:
    """Yield the names of the modules above that have a forward, nearest first. A ModuleList has none."""
    while name := name.rpartition(".")[0]:
        if has_own_forward(modules[name]):
            yield name


#: a parent's children, a key in them, its module, and the pinned module that this is or contains
Places = list[tuple[Mapping[str, nn.Module | None], str, nn.Module, PinnedModule]]


def places(root: nn.Module, pin_map: PinMap) -> Places:
    """Return the places of the pinned modules and of the modules around them, for ``refuse_replaced``."""
    held = dict[tuple[int, str], Any]()
    for member in pin_map.covered:
        module = root
        for key in member.name.split("."):
            children = children_of(module)
            module = cast("nn.Module", children[key])
            held[id(children), key] = children, key, module, member
    return list(held.values())


def refuse_replaced(held: Places) -> None:
    """Raise PlanError if a pinned module, or a module around one, was replaced by another."""
    for children, key, module, member in held:
        if children.get(key) is not module:
            raise PlanError.of(
                f"{member.name!r}, pinned to {member.pin.dtype} ({member.pin.pattern!r}), was replaced in the run",
                "replace it before trainer.fit(), or in configure_model",
            )


@dataclass(frozen=True, slots=True)
class PinState:
    """The state of a pinned module that its forward reads."""

    dtype: torch.dtype
    #: output dtype: the input's if ``to_input_dtype`` and known, else ``output``, else unchanged
    output: torch.dtype | None
    to_input_dtype: bool
    device_type: str
    #: True if the module has weights: an input in their dtype then says nothing about the caller
    weighted: bool
    #: ``entry``: its caller is not covered by the pin; ``owns``: it has tensors of its own
    entry: bool
    owns: bool
    #: names of its own quantized tensors, which are never cast; noted before they are sharded
    kept: frozenset[str]


#: ``dtype``: the dtype of this thread's innermost running pinned forward
_region = threading.local()


@contextmanager
def _inside(dtype: torch.dtype) -> Generator[None, None, None]:
    """Mark a pinned forward as running, and set the default dtype.

    Tensors that the module creates (positions, masks) then have its dtype.
    """
    before, _region.dtype = getattr(_region, "dtype", None), dtype
    try:
        with default_dtype(dtype):
            yield
    finally:
        _region.dtype = before


def in_pinned_forward() -> bool:
    """True if a pinned module's forward runs in this thread, except in compiled code."""
    return getattr(_region, "dtype", None) is not None


def is_pinned(module: nn.Module) -> bool:
    """True if a pin changes the module's computation."""
    return "_lmp_pin" in vars(module) or "_lmp_wide" in vars(module)


class PinnedForward(Swapped):
    """Mix-in of a pinned module: it runs and is stored in its pin's dtype.

    ``model.to(dtype)`` and the like move the module, but do not change its dtype.
    """

    lmp_state = ("_lmp_pin", "_lmp_pin_inside")
    _lmp_pin: PinState

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Cast floating inputs, run without autocast, and cast floating outputs as the pin says.

        Outputs are cast only if the caller is not covered by the same pin. A module without tensors
        of its own, called by one of the same pin, runs unchanged.
        """
        pin, run = self.__dict__.get("_lmp_pin"), cast("Any", super()).forward
        if pin is None:
            return run(*args, **kwargs)
        compiling, entry = torch.compiler.is_compiling(), pin.entry
        if not entry and not compiling:
            # Code may iterate over a container and never call it, so names do not tell the caller.
            # A module that was called from its region once counts as inside it for the whole run,
            # because no pinned forward runs around a recomputation in the backward pass.
            if getattr(_region, "dtype", None) == pin.dtype:
                self.__dict__["_lmp_pin_inside"] = True
            entry = "_lmp_pin_inside" not in self.__dict__
        if not (entry or pin.owns):
            return run(*args, **kwargs)
        came_in = floating_dtype((args, kwargs)) if pin.to_input_dtype else None
        # models cast the input to the weight's dtype (Mamba's norms, ViT's projection)
        if pin.weighted and came_in == pin.dtype:
            came_in = None
        args, kwargs = cast_within_range(args, pin.dtype), cast_within_range(kwargs, pin.dtype)
        # setting a default dtype would break a compiled graph
        with torch.autocast(pin.device_type, enabled=False), nullcontext() if compiling else _inside(pin.dtype):
            output = run(*args, **kwargs)
            # a returned weight is an activation from here on, and is cast like others
            if not compiling and isinstance(output, nn.Parameter):
                output = output.view_as(output)
        wanted = came_in or pin.output
        return cast_within_range(output, wanted) if entry and wanted is not None else output

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Apply ``fn`` to the module, but keep its own floating tensors in the pin's dtype.

        Quantized tensors become what ``fn`` returns.
        """
        pin = self.__dict__.get("_lmp_pin")
        run, module = cast("Any", super())._apply, cast("nn.Module", self)
        takes_recurse = apply_takes_recurse(original_class(module))
        if pin is None:
            return run(fn, recurse) if takes_recurse else run(fn)
        dtype, own = pin.dtype, _ids([module])
        kept = {id(getattr(module, name, None)) for name in pin.kept}
        # its _apply recurses by itself, and pinned children keep their own pins
        if not takes_recurse:
            kept |= _ids(module.modules()) - own

        @wraps(fn)  # torchmetrics reads the name of the function
        def keeping_the_pin(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            if id(tensor) in kept or not moved.is_floating_point() or moved.dtype == dtype:
                return moved
            # a metric's states, which no cast changes
            if id(tensor) not in own and moved.dtype == tensor.dtype:
                return moved
            # from the original: ``moved`` may have lost bits in a narrower dtype
            return tensor.to(device=moved.device, dtype=dtype)

        if not takes_recurse:
            return run(keeping_the_pin)
        if recurse:
            for child in module.children():
                apply_to_tensors(child, fn)
        return run(keeping_the_pin, recurse=False)


def apply(pin_map: PinMap, *, mixed: bool, compute_dtype: torch.dtype, device_type: str) -> None:
    """Store and run every covered module in its pin's dtype, in place.

    Gradients of cast parameters are dropped. ``mixed`` is True under autocast, whose dtype is
    ``compute_dtype``. A second call updates the state of modules that are pinned already.
    """
    # inner modules first: an `_apply` around one then leaves its dtype alone
    for member in reversed(pin_map.members):
        module = member.module
        module.__dict__.pop("_lmp_pin_inside", None)  # left by an earlier run
        swap_out(module, wide_linear.WideForward)
        state = _state(member, mixed, compute_dtype, device_type)
        if state.owns or has_own_forward(module) or has_own_apply(original_class(module)):
            swap_in(module, PinnedForward, _lmp_pin=state)
        _store([module], {id(tensor): state.dtype for tensor in chain(*castable(module))}, state.dtype)
    for member in pin_map.wide:  # a weight tied to a pinned one keeps that pin's dtype
        wide = wide_linear.Wide(to_torch(member.pin.dtype), device_type)
        swap_in(member.module, wide_linear.WideForward, _lmp_wide=wide)


def _state(member: PinnedModule, mixed: bool, compute_dtype: torch.dtype, device_type: str) -> PinState:
    """Return the state for the forward of ``member``.

    Without ``pin.output``, outputs get the input's dtype if autocast is off around the module.
    Under autocast they stay as they are, except that a pin in the other half format returns fp32.
    """
    module, dtype, output = member.module, to_torch(member.pin.dtype), member.pin.output
    own, quantized = _own(module), uncastable(module)
    # an earlier run may have sharded the module since
    before: PinState | None = vars(module).get("_lmp_pin")
    kept = {name for name, tensor in own if id(tensor) in quantized} | (before.kept if before else set[str]())
    # inside another pinned region autocast is off, so nothing would cast the output there
    returns = output == "input" or (output is None and (not mixed or member.inside is not None))
    wanted = None if output in (None, "pin", "input") else to_torch(output)
    if returns:
        wanted = to_torch(member.inside) if member.inside else compute_dtype
    elif output is None and {dtype, compute_dtype} == set(HALF):
        wanted = torch.float32  # torch.cat and others refuse a mix of both half formats
    weighted = output is None and next(module.parameters(), None) is not None
    return PinState(dtype, wanted, returns, device_type, weighted, member.entry, bool(own), frozenset(kept))


def unpin(module: nn.Module) -> None:
    """Remove the pins from ``module`` and all modules below it; dtypes stay as they are.

    Use it before scripting, or for another framework.
    """
    remove(module.modules())


def remove(modules: Iterable[nn.Module]) -> None:
    """Give each pinned module among ``modules`` its own forward back. Stored dtypes are unchanged."""
    for module in modules:
        if is_pinned(module):
            swap_out(module, wide_linear.WideForward)
            swap_out(module, PinnedForward)


# ------------------------------------------------------------------ tensors without a pin


def cast_unpinned(root: nn.Module, pin_map: PinMap, policy: PrecisionPolicy) -> None:
    """Cast the tensors below ``root`` that no pin covers, in place, to the dtypes of ``policy``.

    Parameters are cast to the storage dtype, and tensors that the model itself declares to fp32.
    Buffers are cast to the policy's ``buffer_dtype``, else to a half storage dtype. If storage is
    fp32 without ``buffer_dtype``, only buffers are cast whose dtype some cast parameter had, such
    as the statistics of a batch norm in half precision.

    Quantized weights with their scales keep their dtype, and float64 parameters too if storage is
    fp32. A module with an ``_apply`` of its own casts itself, as in ``module.to()``. It may keep a
    tensor as it is. Other tensors that it casts follow the rule of buffers.
    """
    covered = {id(member.module) for member in pin_map.members}
    modules = [module for module in root.modules() if id(module) not in covered]
    own, storage = list(map(castable, modules)), to_torch(policy.storage_dtype)
    dtype = policy.buffer_dtype or (policy.storage_dtype if policy.storage_dtype != "fp32" else None)
    moved = {tensor.dtype for parameters, _ in own for tensor in parameters if not _keeps(tensor, storage)}
    to, only = (storage, moved) if dtype is None else (to_torch(dtype), None)
    wanted = dict[int, torch.dtype]()
    for parameters, buffers in own:
        wanted.update((id(tensor), storage) for tensor in parameters if tensor.dtype in moved)
        wanted.update((id(tensor), to) for tensor in buffers if only is None or tensor.dtype in only)
    wanted.update((id(declared.tensor), torch.float32) for declared in pin_map.declared)
    # a module without a pin may own a pinned tensor too, like BERT's head
    for member in pin_map.members:
        for tensor in member.module.parameters(recurse=False):
            wanted.pop(id(tensor), None)
    _store(modules, wanted, to, only)


def _store(
    modules: Sequence[nn.Module],
    wanted: Mapping[int, torch.dtype],
    attributes: torch.dtype,
    only: Collection[torch.dtype] | None = None,
) -> None:
    """Cast, in place, the tensors of ``modules`` whose ``id`` is in ``wanted`` to the dtype there.

    Gradients of cast tensors are dropped. A module with an ``_apply`` of its own casts itself and
    all modules below it. Other tensors that its ``_apply`` passes are cast to ``attributes``. With
    ``only``, they are cast only from these dtypes.
    """
    done = set[int]()
    changes = any(wanted.get(id(tensor), tensor.dtype) != tensor.dtype for tensor in _tensors(modules))
    for module in modules:
        if id(module) in done or not (changes or only is None) or not has_own_apply(original_class(module)):
            continue
        tensors = _tensors(module.modules())
        # sharded tensors were cast in an earlier run
        if any(hasattr(tensor, "to_local") for tensor in tensors):
            continue
        moving = [tensor for tensor in tensors if wanted.get(id(tensor), tensor.dtype) != tensor.dtype]
        for tensor in moving:
            tensor.grad = None
        moving_ids = set(map(id, moving))
        left = [tensor for tensor in tensors if id(tensor) not in moving_ids]
        left += [tensor.grad for tensor in left if tensor.grad is not None]
        Cast({id(tensor): wanted[id(tensor)] for tensor in moving}, left, attributes, only).run_own_apply(module)
        done.update(map(id, module.modules()))
    for tensor in _tensors(module for module in modules if id(module) not in done):
        if id(tensor) in wanted:
            cast_([tensor], wanted[id(tensor)])


def _tensors(modules: Iterable[nn.Module]) -> list[Tensor]:
    return [tensor for module in modules for _, tensor in _own(module)]


def kept_dtypes(root: nn.Module, storage: torch.dtype) -> dict[int, torch.dtype]:
    """Return the dtype of each parameter that is never cast to ``storage``, by ``id``.

    These are quantized weights, their scales, and float64 parameters if ``storage`` is fp32.
    """
    return {
        id(parameter): parameter.dtype
        for module in root.modules()
        for left in [uncastable(module)]
        for parameter in module.parameters(recurse=False)
        if id(parameter) in left or (_keeps(parameter, storage) and not hasattr(parameter, "to_local"))
    }


def _keeps(tensor: Tensor, storage: torch.dtype) -> bool:
    return tensor.dtype == torch.float64 and storage == torch.float32


# ------------------------------------------------------------------ tensors that a model keeps fp32


def _declared(
    root: nn.Module, storage: str, pinned: Iterable[nn.Module], *, rotary: bool = False
) -> tuple[Declared, ...]:
    """Return the tensors that models keep in fp32 although ``storage`` is ``"bf16"`` or ``"fp16"``.

    Tensors of ``pinned`` modules are left out. The outermost model's lists count, because they
    include the lists of the models inside. With ``rotary``, the frequencies of transformers' rotary
    embeddings are returned too. For another ``storage`` the result is empty.
    """
    taken, inside, declared = _ids(pinned), set[int](), list[Declared]()
    for prefix, model in root.named_modules():
        patterns = () if id(model) in inside else kept_in_fp32(model, storage)
        if not patterns:
            continue
        inside.update(map(id, model.modules()))
        for name, module in model.named_modules():
            left = uncastable(module) | taken
            for key, tensor in _own(module):
                pattern = next((word for word in patterns if re.search(word, f"{name}.{key}".strip("."))), None)
                if pattern and tensor.is_floating_point() and id(tensor) not in left:
                    place = f"{prefix}.{name}".strip(".")
                    declared.append(Declared(place, module, key, pattern, original_class(model).__name__))
    if rotary and to_torch(storage) in HALF:
        declared += _rotary_buffers(root, taken | {id(other.tensor) for other in declared})
    return tuple(declared)


def _rotary_buffers(root: nn.Module, left: set[int]) -> Iterator[Declared]:
    for name, module in root.named_modules():
        cls = original_class(module)
        for key, tensor in unsaved_buffers(module) if is_rotary(cls) else ():
            if tensor.is_floating_point() and id(tensor) not in left:
                yield Declared(name, module, key, "rotary frequencies", cls.__name__)


def fp32_names(root: nn.Module, pinned: Mapping[nn.Module, str]) -> dict[str, list[str]]:
    """Return the names of tensors that stay fp32, for ``"bf16"`` and for ``"fp16"`` storage.

    They are tensors of modules that ``pinned`` maps to ``"fp32"``, and tensors that a model
    declares. The names have no parts of wrappers. A format without such tensors has no entry.
    """
    fp32 = _ids(module for module, dtype in pinned.items() if dtype == "fp32")
    kept = {half: fp32 | {id(each.tensor) for each in _declared(root, half, pinned)} for half in ("bf16", "fp16")}
    owned = [
        (plain_name(f"{name}.{key}".strip(".")), id(tensor))
        for name, module in root.named_modules(remove_duplicate=False)
        for key, tensor in _own(module)
    ]
    return {half: [name for name, key in owned if key in ids] for half, ids in kept.items() if ids}


def _own(module: nn.Module) -> list[tuple[str, Tensor]]:
    return [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]


def _ids(modules: Iterable[nn.Module]) -> set[int]:
    return {id(tensor) for module in modules for _, tensor in _own(module)}
