"""Units whose forward runs on some ranks only: an expert that is a unit of its own, a layer that is dropped.

A gather is a collective: where one rank runs a unit and another does not, they wait for each other, or take the weights
of one for another's. Here every rank goes through the units in one order, and passes through those it skips: they are
gathered and resharded, forward and backward, and nothing is computed. Where all ranks run all units nothing is added.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.hooks import RemovableHandle

from lightning_mp.compat import torch as compat
from lightning_mp.compat import torch_sharding as sharding_compat
from lightning_mp.engines.same_order import END, SameOrder
from lightning_mp.errors import Fault, PlanError
from lightning_mp.numerics.nested import floating_in, map_tensors


@dataclass(eq=False, slots=True)
class _Unit:
    """A unit, and those directly below it in the order in which every rank goes through them."""

    name: str
    module: nn.Module
    below: list[_Unit] = field(default_factory=list["_Unit"])
    #: how many of ``below`` this rank is past
    place: int = 0
    #: the names of those below, as this rank came to them
    calls: list[str] = field(default_factory=list[str])
    #: a unit that runs once more begins a round anew, in which all units are passed again
    rounds: bool = True


class SkippedUnits:
    """Keeps the ranks together in the forward of ``root``, from ``start`` to ``stop``."""

    def __init__(
        self, root: nn.Module, *, compiled: bool, device: torch.device, recomputed: Sequence[nn.Module] = ()
    ) -> None:
        self._active, self._recording, self._manual, self._compares = False, False, False, False
        self._within = {id(part) for region in recomputed for part in region.modules() if part is not region}
        self._learnt: set[str] = set()
        parts: list[tuple[str, nn.Module]] = list(root.named_modules())
        units = {name: _Unit(name, part) for name, part in parts if _is_unit(part)}
        self._units = list(units.values())
        self._order = SameOrder([*units, *map(_end_of, units)], device)
        apart: Any = torch.compiler.disable if compiled else _as_it_is
        self._hooks: list[RemovableHandle] = []
        for name, unit in units.items() if dist.get_world_size() > 1 else ():
            above = _above(name, units)
            if above is not None:
                above.below.append(unit)
                enter = apart(partial(self._enter, above, unit))
                self._hooks.append(unit.module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True))
                self._hooks.append(unit.module.register_forward_hook(apart(partial(self._note, unit))))
        for unit in self._units:
            if unit.below:
                begin, end = apart(partial(self._begin, unit)), apart(partial(self._end, unit))
                self._hooks.append(unit.module.register_forward_pre_hook(begin, prepend=True))
                self._hooks.append(unit.module.register_forward_hook(end, prepend=True))

    def release(self) -> None:
        """Leave the units."""
        while self._hooks:
            self._hooks.pop().remove()

    def _begin(self, unit: _Unit, _module: nn.Module, _inputs: Any) -> None:
        unit.place = 0

    def _enter(self, above: _Unit, unit: _Unit, _module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Before a unit: pass through those in front of it that this rank skipped."""
        if compat.in_backward():
            return None
        if self._manual:
            self._meet(unit.name)
        if not self._active:
            return None
        if self._recording:
            above.calls.append(unit.name)
        place, skipped = above.below.index(unit), list[_Unit]()
        if place < above.place:
            if not above.rounds:
                return None  # never while it records
            skipped, above.place = above.below[above.place :], 0
        skipped += above.below[above.place : place]
        above.place = place + 1
        led = self._through(skipped, (args, kwargs)) if skipped else None
        self._meet(unit.name)
        return led

    def _end(self, unit: _Unit, _module: nn.Module, _inputs: Any, output: Any) -> Any:
        """After the last unit below ``unit``: pass through the rest."""
        if not self._active or compat.in_backward():
            return None
        skipped, unit.place = unit.below[unit.place :], len(unit.below)
        led = self._through(skipped, output) if skipped else None
        self._meet(_end_of(unit.name))
        return led

    def catch_up(self) -> None:
        """Before a collective of the user's in the step (``self.log(..., sync_dist=True)``): be past every unit.

        Another rank may have run them by now, and must not wait in one of them while this one is in that collective.
        They are then no part of this rank's loss: in training the first step is refused for that.
        """
        root = self._units[0]
        if not self._active or not self._hooks or compat.in_backward() or not root.rounds:
            return
        skipped, root.place = root.below[root.place :], len(root.below)
        if skipped:
            end = torch.zeros((), device=next(root.module.parameters()).device)
            for unit in skipped:
                end = self._pass(unit, end)

    def _meet(self, place: str) -> None:
        if self._recording:
            self._order.meet(place)

    def _note(self, unit: _Unit, _module: nn.Module, _inputs: Any, output: Any) -> None:
        if self._recording and not compat.in_backward():
            self._order.note(unit.name, output)

    def before_backward(self, loss: Tensor) -> None:
        """Compare the losses of a first step.

        Raises:
            PlanError: on every rank, where other units contribute to them.
        """
        if self._compares and self._hooks:
            self._compares = self._manual and self._recording
            self._order.compare_losses(loss)

    def start(self, method: str, *, manual: bool) -> None:
        """A call of ``method`` begins; where backward passes come in between (``manual``) no unit may be skipped."""
        self._active, self._manual, self._recording = not manual, manual, method not in self._learnt
        self._compares = self._recording and method == "training_step"
        self._learnt.add(method)

    def stop(self) -> None:
        """The call is over; after a method's first, go on in the order in which the ranks ran the units.

        Raises:
            PlanError: units were skipped on some ranks where they cannot be passed.
        """
        if self._manual and self._hooks:
            self._meet(END)
        learns = self._active and self._recording and self._hooks
        self._active = self._recording = self._manual = False
        if not learns:
            return
        parents = [unit for unit in self._units if unit.below]
        everywhere: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everywhere, [unit.calls for unit in parents])
        for unit, calls in zip(parents, zip(*everywhere, strict=True), strict=True):
            named = {below.name: below for below in unit.below}
            unit.below = [named[name] for name in merged(list(named), calls)]
            unit.rounds = any(one != calls[0] for one in calls)
            inside = [below.name for below in unit.below if id(below.module) in self._within]
            if unit.rounds and inside:
                self._refuse_recomputed(inside[0])

    def _refuse_recomputed(self, name: str) -> None:
        fault = Fault(
            f"{name!r} or units beside it run on some ranks only, in a region that is recomputed",
            "checkpointing of what every rank runs, or of such units themselves",
            "write checkpointing= with a pattern that matches the units themselves, or leave it out",
        )
        raise PlanError([fault])

    def _through(self, skipped: list[_Unit], values: Any) -> Any:
        """``values`` with one floating tensor, if any that takes part in the backward pass, led through ``skipped``."""
        there = floating_in(values)
        led = next((tensor for tensor in there if tensor.requires_grad), there[0] if there else None)
        start = torch.zeros((), device=next(skipped[0].module.parameters()).device) if led is None else led
        end = start
        for unit in skipped:
            end = self._pass(unit, end)
        return values if led is None else map_tensors(values, lambda tensor: end if tensor is led else tensor)

    def _pass(self, unit: _Unit, tensor: Tensor) -> Tensor:
        """What FSDP2 does around the unit's forward, and nothing in between."""
        self._meet(unit.name)
        asks = torch.zeros((), requires_grad=torch.is_grad_enabled())
        tensor = _Same.apply(sharding_compat.enter_unit(unit.module, tensor), asks)
        for below in unit.below:
            tensor = self._pass(below, tensor)
        if unit.below:  # hooks of one tensor would run for the inner unit first
            tensor = _Same.apply(tensor, asks)
            self._meet(_end_of(unit.name))
        tensor = sharding_compat.leave_unit(unit.module, tensor)
        if self._recording:
            self._order.note(unit.name, tensor)
        return tensor


def _is_unit(module: nn.Module) -> bool:
    return isinstance(module, FSDPModule)


def _as_it_is(hook: Callable[..., Any]) -> Callable[..., Any]:
    return hook


def _above(name: str, units: dict[str, _Unit]) -> _Unit | None:
    while name:
        name = name.rpartition(".")[0]
        if name in units:
            return units[name]
    return None


def merged(known: list[str], calls: Sequence[list[str]]) -> list[str]:
    """``known`` in an order in which every rank first called them; as it is where there is none.

    What no rank called comes after what came before other items of its list.
    """
    before: dict[str, set[str]] = {}
    lists: dict[str, set[str]] = {}
    for order in (list(dict.fromkeys(names)) for names in calls):
        for first, second in zip([None, *order], order, strict=False):
            earlier = {first} if first is not None else set[str]()
            before.setdefault(second, set()).update(earlier)
            lists.setdefault(_list_of(second), set()).update(earlier)
    for name in known:
        if name not in before:
            before[name] = {one for one in lists.get(_list_of(name), ()) if _list_of(one) != _list_of(name)}
    found: dict[str, None] = {}
    while len(found) < len(known):
        free = next((name for name in known if name not in found and before[name] <= found.keys()), None)
        if free is None:
            return known
        found[free] = None
    return list(found)


def _list_of(name: str) -> str:
    return name.rpartition(".")[0]


def _end_of(name: str) -> str:
    return f"the end of {name or 'the step'}"


class _Same(torch.autograd.Function):
    """The same numbers, which take part in the backward pass: the unit around them then does so too."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, *asks: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.asks = len(asks)
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return gradient, *(gradient.new_zeros(()) for _ in range(ctx.asks))
