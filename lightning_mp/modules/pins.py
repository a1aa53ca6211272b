"""Module-level dtypes: which pin covers which module, what is stored in which, and running a module in its pin's."""

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
    """One module with the pin that covers it."""

    name: str
    module: nn.Module
    pin: Pin
    #: nothing that the pin covers calls it, so its inputs and outputs cross the boundary
    entry: bool
    #: the dtype of the pin whose region lies around that of its own, if one does
    inside: str | None


@dataclass(frozen=True, slots=True)
class Declared:
    """A tensor that a model itself stores in fp32: its module, the list's entry that means it, the model's class."""

    name: str
    module: nn.Module
    key: str
    pattern: str
    model: str

    @property
    def tensor(self) -> Tensor:
        """The tensor as it is now; sharding puts another in its place."""
        return getattr(self.module, self.key)


@dataclass(frozen=True, slots=True)
class PinMap:
    """Which pin covers which module; ``shadowed`` are the patterns that earlier ones leave nothing to."""

    members: tuple[PinnedModule, ...] = ()
    shadowed: tuple[str, ...] = ()
    #: what no pin covers and the model itself keeps in fp32, where the rest is stored in half precision
    declared: tuple[Declared, ...] = ()
    #: Linear layers that sum in fp32: they are stored as if no pin were there
    wide: tuple[PinnedModule, ...] = ()

    @property
    def covered(self) -> tuple[PinnedModule, ...]:
        """What a pin decides how to compute."""
        return self.members + self.wide

    def dtypes(self) -> dict[int, str]:
        """``id`` of every parameter that a pin, or the model itself, decides → its dtype."""
        dtypes = {id(declared.tensor): "fp32" for declared in self.declared}
        for member in self.members:
            own = set(map(id, member.module.parameters(recurse=False))) - uncastable(member.module)
            dtypes |= dict.fromkeys(own, member.pin.dtype)
        return dtypes


def resolve(
    root: nn.Module, pins: Sequence[Pin], faults: Faults, storage: str = "fp32", buffers: str | None = None
) -> PinMap:
    """Match ``pins``, the first that covers a module wins, against the modules below ``root``; change nothing.

    ``storage`` is the dtype of what no pin covers, ``buffers`` that of its buffers, if the user named one.
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
    """A pin on one owner of a tied weight covers an owner that no pin mentions; two dtypes of one are noted."""
    for places in tied:
        pinned = [name for name, _, _ in places if name in index_of]
        for name, _, _ in places if pinned else ():
            # BERT's head shares a bias with the decoder in it, and nothing else
            if name and not any(owner.startswith(f"{name}.") for owner in pinned):
                index_of.setdefault(name, min(index_of[owner] for owner in pinned))
    for places in tied:
        dtypes = {f"{name}.{key}": pins[index_of[name]].dtype for name, _, key in places if name in index_of}
        if len(set(dtypes.values())) > 1:
            given = " and ".join(f"{place} pinned to {dtype}" for place, dtype in dtypes.items())
            fix = "pin both to the same dtype, or untie them (transformers: tie_word_embeddings=False)"
            faults.add(f"contradicting pins on tied weights: {given}", fix=fix)
        # The root itself is never pinned: a weight it owns directly could not keep a pin's dtype.
        own = next((key for name, _, key in places if not name), None)
        if own is not None and dtypes:
            given = f"a pin on {next(iter(dtypes))}, which is tied to the root module's own {own!r}"
            faults.add(given, fix="let the root reach it through the module instead of owning the parameter itself")


def _called_above(name: str, modules: dict[str, nn.Module]) -> Iterator[str]:
    """The names of the modules above that have a forward, nearest first; a ModuleList calls nothing."""
    while name := name.rpartition(".")[0]:
        if has_own_forward(modules[name]):
            yield name


#: the children of what holds a module, its key among them, the module, and which pinned one it is or is around
Places = list[tuple[Mapping[str, nn.Module | None], str, nn.Module, PinnedModule]]


def places(root: nn.Module, pin_map: PinMap) -> Places:
    """Where the pinned modules of ``root`` are, and what is around them, for ``refuse_replaced`` in every step."""
    held = dict[tuple[int, str], Any]()
    for member in pin_map.covered:
        module = root
        for key in member.name.split("."):
            children = children_of(module)
            module = cast("nn.Module", children[key])
            held[id(children), key] = children, key, module, member
    return list(held.values())


def refuse_replaced(held: Places) -> None:
    """Raise a PlanError where code put another in place of a pinned module: nobody tells the plan of it."""
    for children, key, module, member in held:
        if children.get(key) is not module:
            raise PlanError.of(
                f"{member.name!r}, pinned to {member.pin.dtype} ({member.pin.pattern!r}), was replaced in the run",
                "replace it before trainer.fit(), or in configure_model",
            )


@dataclass(frozen=True, slots=True)
class PinState:
    """What a pinned module needs in its forward."""

    dtype: torch.dtype
    #: what it returns: the dtype that came in, if so and if known, else ``output``, else what its own forward does
    output: torch.dtype | None
    to_input_dtype: bool
    device_type: str
    #: it has weights, whose dtype is then no dtype that came in
    weighted: bool
    #: what calls it is not of the pin, or it has tensors of its own to run with
    entry: bool
    owns: bool
    #: names of its own quantized tensors, which no cast changes; known before they are sharded
    kept: frozenset[str]


#: by thread, as ``dtype``, that of the innermost pinned forward under way
_region = threading.local()


@contextmanager
def _inside(dtype: torch.dtype) -> Generator[None, None, None]:
    """Within, what a pinned module makes (positions, masks) is of its dtype, and calls come from inside."""
    before, _region.dtype = getattr(_region, "dtype", None), dtype
    try:
        with default_dtype(dtype):
            yield
    finally:
        _region.dtype = before


def in_pinned_forward() -> bool:
    """Whether the forward of a pinned module is under way."""
    return getattr(_region, "dtype", None) is not None


def is_pinned(module: nn.Module) -> bool:
    """Whether the module runs in a pin's dtype."""
    return "_lmp_pin" in vars(module) or "_lmp_wide" in vars(module)


class PinnedForward(Swapped):
    """Runs a module in its pin's dtype and keeps it stored in it, whatever ``.to`` is called on the model."""

    lmp_state = ("_lmp_pin", "_lmp_pin_inside")
    _lmp_pin: PinState

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Cast floating inputs, run outside autocast, cast floating outputs as the pin says."""
        pin, run = self.__dict__.get("_lmp_pin"), cast("Any", super()).forward
        if pin is None:
            return run(*args, **kwargs)
        compiling, entry = torch.compiler.is_compiling(), pin.entry
        if not entry and not compiling:
            # Code may iterate over a container and never call it. What was called from inside once stays inside: where
            # it is recomputed in a backward pass, nothing is around it.
            if getattr(_region, "dtype", None) == pin.dtype:
                self.__dict__["_lmp_pin_inside"] = True
            entry = "_lmp_pin_inside" not in self.__dict__
        if not (entry or pin.owns):
            return run(*args, **kwargs)
        came_in = floating_dtype((args, kwargs)) if pin.to_input_dtype else None
        if pin.weighted and came_in == pin.dtype:  # models cast it to the weight's (Mamba's norms, ViT's projection)
            came_in = None
        args, kwargs = cast_within_range(args, pin.dtype), cast_within_range(kwargs, pin.dtype)
        # to set a default dtype would break a graph
        with torch.autocast(pin.device_type, enabled=False), nullcontext() if compiling else _inside(pin.dtype):
            output = run(*args, **kwargs)
            if not compiling and isinstance(output, nn.Parameter):  # from here on an activation, to be cast as any
                output = output.view_as(output)
        wanted = came_in or pin.output
        return cast_within_range(output, wanted) if entry and wanted is not None else output

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        pin = self.__dict__.get("_lmp_pin")
        run, module = cast("Any", super())._apply, cast("nn.Module", self)
        takes_recurse = apply_takes_recurse(original_class(module))
        if pin is None:
            return run(fn, recurse) if takes_recurse else run(fn)
        dtype, own = pin.dtype, _ids([module])
        kept = {id(getattr(module, name, None)) for name in pin.kept}
        if not takes_recurse:  # it goes on to its children, where each that is pinned keeps its own pin
            kept |= _ids(module.modules()) - own

        @wraps(fn)  # torchmetrics reads the name of the function
        def keeping_the_pin(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            if id(tensor) in kept or not moved.is_floating_point() or moved.dtype == dtype:
                return moved
            if id(tensor) not in own and moved.dtype == tensor.dtype:  # the states of a metric, which no cast changes
                return moved
            # From the original, not from ``moved``: a trip through a narrower dtype would lose bits.
            return tensor.to(device=moved.device, dtype=dtype)

        if not takes_recurse:
            return run(keeping_the_pin)
        if recurse:
            for child in module.children():
                apply_to_tensors(child, fn)
        return run(keeping_the_pin, recurse=False)


def apply(pin_map: PinMap, *, mixed: bool, compute_dtype: torch.dtype, device_type: str) -> None:
    """Store and run every covered module in its pin's dtype, in place; a module pinned so already is left alone."""
    for member in reversed(pin_map.members):  # an `_apply` around a pinned module finds it pinned, and leaves it so
        module = member.module
        module.__dict__.pop("_lmp_pin_inside", None)  # of an earlier run
        swap_out(module, wide_linear.WideForward)
        state = _state(member, mixed, compute_dtype, device_type)
        if state.owns or has_own_forward(module) or has_own_apply(original_class(module)):
            swap_in(module, PinnedForward, _lmp_pin=state)
        _store([module], {id(tensor): state.dtype for tensor in chain(*castable(module))}, state.dtype)
    for member in pin_map.wide:  # over the pin of a weight that it is tied to, which is how that is stored
        wide = wide_linear.Wide(to_torch(member.pin.dtype), device_type)
        swap_in(member.module, wide_linear.WideForward, _lmp_wide=wide)


def _state(member: PinnedModule, mixed: bool, compute_dtype: torch.dtype, device_type: str) -> PinState:
    module, dtype, output = member.module, to_torch(member.pin.dtype), member.pin.output
    own, quantized = _own(module), uncastable(module)
    before: PinState | None = vars(module).get("_lmp_pin")  # of an earlier run, which may have sharded the module
    kept = {name for name, tensor in own if id(tensor) in quantized} | (before.kept if before else set[str]())
    # Inside another pinned region autocast is off, so nothing there would cast what comes out.
    returns = output == "input" or (output is None and (not mixed or member.inside is not None))
    wanted = None if output in (None, "pin", "input") else to_torch(output)
    if returns:
        wanted = to_torch(member.inside) if member.inside else compute_dtype
    elif output is None and {dtype, compute_dtype} == set(HALF):
        wanted = torch.float32  # it meets what is of autocast's half format, and functions as torch.cat mix no two
    weighted = output is None and next(module.parameters(), None) is not None
    return PinState(dtype, wanted, returns, device_type, weighted, member.entry, bool(own), frozenset(kept))


def unpin(module: nn.Module) -> None:
    """Give ``module`` and all below it their own forward back, for scripting or another framework; dtypes stay."""
    remove(module.modules())


def remove(modules: Iterable[nn.Module]) -> None:
    """Undo the forward of every pinned module among ``modules``; what is stored stays as it is."""
    for module in modules:
        if is_pinned(module):
            swap_out(module, wide_linear.WideForward)
            swap_out(module, PinnedForward)


# ------------------------------------------------------------------ what no pin covers


def cast_unpinned(root: nn.Module, pin_map: PinMap, policy: PrecisionPolicy) -> None:
    """Cast all below ``root`` that no pin covers, in place, to what ``policy`` stores, or the model itself declares.

    Buffers follow half-precision parameters, and those that become fp32 here (the statistics of a batch norm that was
    made half); any other stays what the user made it. So do quantized weights and all that belongs to them, and float64
    where the policy stores fp32. Modules with an ``_apply`` of their own do the cast themselves, as in ``module.to()``:
    they may keep a tensor as it is, or cast tensors that are no buffers, which then follow the rule of buffers.
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
    for member in pin_map.members:  # a module around it may own one of its tensors too, as BERT's head does
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

    A module with an ``_apply`` of its own is asked for the cast, with all below it. It may pass other tensors than its
    parameters and buffers: those become ``attributes`` if their dtype is one of ``only``, or in any case if it is None.
    """
    done = set[int]()
    changes = any(wanted.get(id(tensor), tensor.dtype) != tensor.dtype for tensor in _tensors(modules))
    for module in modules:
        if id(module) in done or not (changes or only is None) or not has_own_apply(original_class(module)):
            continue
        tensors = _tensors(module.modules())
        if any(hasattr(tensor, "to_local") for tensor in tensors):  # sharded, and so cast in a run before
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
    """``id`` of every parameter that is not cast to ``storage`` where no pin covers it → its own dtype."""
    return {
        id(parameter): parameter.dtype
        for module in root.modules()
        for left in [uncastable(module)]
        for parameter in module.parameters(recurse=False)
        if id(parameter) in left or (_keeps(parameter, storage) and not hasattr(parameter, "to_local"))
    }


def _keeps(tensor: Tensor, storage: torch.dtype) -> bool:
    return tensor.dtype == torch.float64 and storage == torch.float32


# ------------------------------------------------------------------ what a model itself keeps in fp32


def _declared(
    root: nn.Module, storage: str, pinned: Iterable[nn.Module], *, rotary: bool = False
) -> tuple[Declared, ...]:
    """What models below ``root`` keep in fp32 where ``storage`` is ``"bf16"`` or ``"fp16"``, less the ``pinned``.

    The outermost model's lists count: it has taken over those of the models inside, and names are relative to it. With
    ``rotary``, the frequencies of transformers' rotary embeddings count too: they are in no state dict.
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
    """By half format, names of tensors of modules ``pinned`` to fp32 and of what a model declares, less wrappers."""
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
