"""Module-level dtypes: which pin covers which module, what is stored in which dtype, and running a module in its pin's.

A weight may also be read outside of its module's forward, where the pin does not hold: ``first_step`` looks for that.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from lightning_mp.compat.torch import apply_to_tensors, children_of
from lightning_mp.errors import Faults, PlanError
from lightning_mp.modules import wide_linear
from lightning_mp.modules.declared import Declared, find
from lightning_mp.modules.patterns import (
    NORMS,
    Place,
    Swapped,
    has_own_forward,
    matches,
    named_submodules,
    no_match,
    not_lazy,
    not_scripted,
    owners,
    swap_in,
    swap_out,
)
from lightning_mp.numerics.dtypes import (
    HALF,
    cast_module_,
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
class PinMap:
    """Which pin covers which module; ``shadowed`` are the patterns that earlier ones leave nothing to."""

    members: tuple[PinnedModule, ...]
    shadowed: tuple[str, ...]
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
        return {id(one.tensor): "fp32" for one in self.declared} | {
            id(parameter): member.pin.dtype
            for member in self.members
            for left in [uncastable(member.module)]
            for parameter in member.module.parameters(recurse=False)
            if id(parameter) not in left
        }


def resolve(root: nn.Module, pins: Sequence[Pin], faults: Faults, storage: str = "fp32") -> PinMap:
    """Match ``pins`` against the modules below ``root``, whose rest is stored in ``storage``; change nothing.

    The first pin in order that covers a module wins; a match covers what is below it, and the other owner of a tied
    weight. Patterns that match nothing and tied weights pinned to two dtypes are noted in ``faults``.
    """
    if not pins:
        return PinMap((), (), find(root, storage, ()))
    named = list(named_submodules(root))
    index_of = _covering(named, pins, root, faults)
    used, wide = set(index_of.values()), list[PinnedModule]()
    for name, module in named:
        if name in index_of and pins[index_of[name]].accumulate is not None:
            pin = pins[index_of.pop(name)]
            wide_linear.check(name, module, pin.pattern, faults)
            not_lazy(name, module, f"pin {pin.pattern!r}", faults)
            wide.append(PinnedModule(name, module, pin, True, None))
    _resolve_ties(owners(root).values(), index_of, pins, faults)
    modules = dict(named)
    members: list[PinnedModule] = []
    seen: set[int] = set()
    for name, module in named:
        index = index_of.get(name)
        if index is None or id(module) in seen:
            continue
        seen.add(id(module))
        callers = list(_called_above(name, modules))
        around = [index_of.get(caller) for caller in callers]
        outer = next((above for above in around if above != index), None)
        if not (callers and isinstance(modules[callers[0]], torch.jit.ScriptModule)):
            not_scripted(name, module, f"pin {pins[index].pattern!r}", faults)
        not_lazy(name, module, f"pin {pins[index].pattern!r}", faults)
        inside = None if outer is None else pins[outer].dtype
        members.append(PinnedModule(name, module, pins[index], around[:1] != [index], inside))
    unused = [pin.pattern for index, pin in enumerate(pins) if index not in used]
    shadowed = [pattern for pattern in unused if any(matches(pattern, name, module) for name, module in named)]
    declared = find(root, storage, [member.module for member in members])
    return PinMap(tuple(members), tuple(shadowed), declared, tuple(wide))


def _covering(
    named: Sequence[tuple[str, nn.Module]], pins: Sequence[Pin], root: nn.Module, faults: Faults
) -> dict[str, int]:
    """Module name → index of the first pin that matches it or something above it."""
    index_of: dict[str, int] = {}
    matched: set[int] = set()
    for name, module in named:
        own = [index for index, pin in enumerate(pins) if matches(pin.pattern, name, module)]
        matched.update(own)
        above = index_of.get(name.rpartition(".")[0])
        candidates = own if above is None else [*own, above]
        if candidates:
            index_of[name] = min(candidates)
    for index, pin in enumerate(pins):
        if index not in matched and pin.pattern != NORMS:  # a kind, which one config may declare for any model
            no_match(pin.pattern, root, "pin", faults)
    return index_of


def _resolve_ties(tied: Iterable[list[Place]], index_of: dict[str, int], pins: Sequence[Pin], faults: Faults) -> None:
    """A tied weight lives in one dtype: a pin on one owner covers an owner that no pin mentions.

    Not one that contains a pinned owner: BERT's head shares a bias with the decoder in it, and nothing else.
    """
    for places in tied:
        pinned = [name for name, _, _ in places if name in index_of]
        for name, _, _ in places if pinned else ():
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


class Places:
    """Where the pinned modules of ``root`` are: nobody calls the plan when code puts another in place of one."""

    def __init__(self, root: nn.Module, pin_map: PinMap) -> None:
        #: by what holds a module, and its key in there, the module and who it is or is around
        self._held: dict[tuple[int, str], tuple[dict[str, nn.Module | None], str, nn.Module, PinnedModule]] = {}
        for member in pin_map.covered:
            module = root
            for key in member.name.split("."):
                children = children_of(module)
                module = cast("nn.Module", children[key])
                self._held[id(children), key] = children, key, module, member

    def refuse_changed(self) -> None:
        """Raise a PlanError where one of them, or what holds it, was replaced."""
        for children, key, module, member in self._held.values():
            if children.get(key) is not module:
                raise PlanError.of(
                    f"{member.name!r}, pinned to {member.pin.dtype} ({member.pin.pattern!r}), was replaced in the run",
                    "replace it before trainer.fit(), or in configure_model",
                )


@dataclass(frozen=True, slots=True)
class PinState:
    """What a pinned module needs in its forward; with ``output=None`` it returns what its own forward does."""

    dtype: torch.dtype
    output: torch.dtype | None
    to_input_dtype: bool
    device_type: str
    #: it has weights, to whose dtype models cast what goes in (Mamba's norms, ViT's projection): that dtype is the
    #: pin's, and ``output`` is what follows expects
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
        came_in = (floating_dtype(args) or floating_dtype(kwargs)) if entry and pin.to_input_dtype else None
        args, kwargs = cast_within_range(args, pin.dtype), cast_within_range(kwargs, pin.dtype)
        with torch.autocast(pin.device_type, enabled=False):
            if compiling:  # to set a default dtype would break the graph
                output = run(*args, **kwargs)
            else:
                with _inside(pin.dtype):
                    output = run(*args, **kwargs)
                    if isinstance(output, nn.Parameter):  # from here on an activation, which autocast may cast
                        output = output.view_as(output)
        wanted = pin.output if pin.weighted and came_in == pin.dtype else came_in or pin.output
        return cast_within_range(output, wanted) if entry and wanted is not None else output

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        pin = self.__dict__.get("_lmp_pin")
        if pin is None:
            return cast("Any", super())._apply(fn, recurse)
        dtype, module = pin.dtype, cast("nn.Module", self)
        kept = {id(getattr(module, name, None)) for name in pin.kept}

        def keeping_the_pin(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            if id(tensor) in kept or not moved.is_floating_point() or moved.dtype == dtype:
                return moved
            # From the original, not from ``moved``: a trip through a narrower dtype would lose bits.
            return tensor.to(device=moved.device, dtype=dtype)

        if recurse:
            for child in module.children():
                apply_to_tensors(child, fn)
        return cast("Any", super())._apply(keeping_the_pin, recurse=False)


def apply(pin_map: PinMap, *, mixed: bool, compute_dtype: torch.dtype, device_type: str) -> None:
    """Store and run every covered module in its pin's dtype, in place; a module pinned so already is left alone.

    ``compute_dtype`` is what a module with no floating input (an embedding) returns to under the true modes.
    """
    for member in pin_map.members:
        module = member.module
        cast_module_(module, to_torch(member.pin.dtype))
        module.__dict__.pop("_lmp_pin_inside", None)  # of an earlier run
        swap_out(module, wide_linear.WideForward)
        state = _state(member, mixed, compute_dtype, device_type)
        if state.owns or has_own_forward(module):
            swap_in(module, PinnedForward, _lmp_pin=state)
    for member in pin_map.wide:  # over the pin of a weight that it is tied to, which is how that is stored
        wide = wide_linear.Wide(to_torch(member.pin.dtype), device_type)
        swap_in(member.module, wide_linear.WideForward, _lmp_wide=wide)


def _state(member: PinnedModule, mixed: bool, compute_dtype: torch.dtype, device_type: str) -> PinState:
    module, dtype, output = member.module, to_torch(member.pin.dtype), member.pin.output
    own, quantized = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)), uncastable(module)
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
    """Give ``module`` and all below it their own forward back after a run with pins; dtypes stay as they are.

    For what wants the plain classes: scripting, parametrizations, another framework.
    """
    remove(module.modules())


def remove(modules: Iterable[nn.Module]) -> None:
    """Undo the forward of every pinned module among ``modules``; what is stored stays as it is."""
    for module in modules:
        if is_pinned(module):
            swap_out(module, wide_linear.WideForward)
            swap_out(module, PinnedForward)


# ------------------------------------------------------------------ what no pin covers


def cast_unpinned(modules: Iterable[nn.Module], policy: PrecisionPolicy) -> None:
    """Cast what each of ``modules`` owns, in place, to what ``policy`` stores.

    Buffers follow half-precision parameters, and those that become fp32 here (the statistics of a batch norm that was
    made half); any other stays what the user made it. So do quantized weights and all that belongs to them, and float64
    where the policy stores fp32.
    """
    found, storage = list(modules), to_torch(policy.storage_dtype)
    buffers = policy.buffer_dtype or (policy.storage_dtype if policy.storage_dtype != "fp32" else None)
    moved = {one.dtype for module in found for one in castable(module, buffers=False) if not _keeps(one, storage)}
    for module in found:
        cast_module_(module, storage, buffers=False, only=moved)
        to, only = (storage, moved) if buffers is None else (to_torch(buffers), None)
        cast_module_(module, to, parameters=False, only=only)


def kept_dtypes(root: nn.Module, storage: torch.dtype) -> dict[int, torch.dtype]:
    """``id`` of every parameter that is not cast to ``storage`` where no pin covers it → its own dtype."""
    return {
        id(one): one.dtype
        for module in root.modules()
        for left in [uncastable(module)]
        for one in module.parameters(recurse=False)
        if id(one) in left or (_keeps(one, storage) and not hasattr(one, "to_local"))
    }


def _keeps(tensor: Tensor, storage: torch.dtype) -> bool:
    return tensor.dtype == torch.float64 and storage == torch.float32
