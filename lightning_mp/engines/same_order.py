"""Whether all ranks gather the same weights in the same order: where one does not, they would wait for ever."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_mp.compat.torch import in_backward
from lightning_mp.errors import Fault, PlanError
from lightning_mp.numerics import graph
from lightning_mp.numerics.nested import tensors_in

END, BACKWARD = "the end of the step", "a backward pass"


class SameOrder:
    """Lets ranks tell each other where they are, each time with a host read: for a first step only."""

    def __init__(self, names: Iterable[str], device: torch.device) -> None:
        self._names, self._device = [*names, END, BACKWARD], device
        #: of what ran, the nodes from which its backward pass starts
        self._starts: dict[str, set[Any]] = {}

    def meet(self, name: str) -> None:
        """Be at ``name`` when all other ranks are.

        Raises:
            PlanError: on every rank, where they are not.
        """
        place = self._names.index(name)
        last, first = (abs(one) for one in self._greatest([place, -place]))
        if first != last:
            one, other = (f"at {self._names[index]!r}" for index in (first, last))
            raise PlanError([_fault(f"a rank {one} when another is {other}")])

    def note(self, name: str, output: Any) -> None:
        """``name`` ran, and this came out."""
        starts = self._starts.setdefault(name, set())
        starts.update(tensor.grad_fn for tensor in tensors_in(output) if tensor.grad_fn is not None)

    def compare_losses(self, loss: Tensor) -> None:
        """Before the backward pass: whether it comes to the same on all ranks.

        Raises:
            PlanError: on every rank, where it does not.
        """
        self.meet(BACKWARD)
        reached = graph.nodes(loss)
        mine = [not reached.isdisjoint(self._starts.get(name, ())) for name in self._names]
        self._starts.clear()
        found = self._greatest([*map(int, mine), *(int(not one) for one in mine)])
        apart = [
            name
            for name, some, not_all in zip(self._names, found, found[len(mine) :], strict=False)
            if some and not_all
        ]
        if apart:
            raise PlanError([_fault(f"a loss to which {apart[0]!r} contributes on some ranks only")])

    def _greatest(self, numbers: list[int]) -> list[int]:
        there = torch.tensor(numbers, device=self._device)
        dist.all_reduce(there, op=dist.ReduceOp.MAX)
        return there.tolist()


def _fault(given: str) -> Fault:
    return Fault(
        f"{given}, with sharded weights, which all ranks gather and sum together",
        "the same modules in the same order on every rank, and in the loss of every rank",
        "run every one on every rank, and add 0 times what one does not need to its loss, or use strategy='mp_ddp' "
        "with find_unused_parameters=True",
    )


class FirstForward:
    """Compares the ranks in the first forward of ``root`` in training, and in the first in evaluation.

    ``gathers`` says of a unit that is about to run whether its weights have to be gathered.
    """

    def __init__(
        self,
        root: nn.Module,
        units: Mapping[str, nn.Module],
        device: torch.device,
        gathers: Callable[[nn.Module], bool] = lambda _unit: True,
    ) -> None:
        self._order, self._active, self._known = SameOrder(units, device), False, set[bool]()
        self._gathers = gathers
        hooks: list[RemovableHandle] = []
        for name, unit in units.items():
            hooks.append(unit.register_forward_pre_hook(partial(self._enter, name), prepend=True))
            hooks.append(unit.register_forward_hook(partial(self._leave, name)))
        hooks.append(root.register_forward_pre_hook(self._begin, prepend=True))
        hooks.append(root.register_forward_hook(self._end))
        self._hooks, self._pending = hooks, False

    def release(self) -> None:
        """Leave the modules."""
        while self._hooks:
            self._hooks.pop().remove()

    def before_backward(self, loss: Tensor) -> None:
        """Compare the first losses too.

        Raises:
            PlanError: on every rank, where other modules contribute to them.
        """
        if self._pending:
            self._pending = False
            self._order.compare_losses(loss)

    def _begin(self, root: nn.Module, _inputs: Any) -> None:
        self._active = root.training not in self._known
        self._known.add(root.training)
        self._pending = self._active and root.training

    def _end(self, *_: Any) -> None:
        if self._active:
            self._order.meet(END)
        self._active = False

    def _enter(self, name: str, unit: nn.Module, _inputs: Any) -> None:
        if self._active and not in_backward() and self._gathers(unit):
            self._order.meet(name)

    def _leave(self, name: str, _unit: nn.Module, _inputs: Any, output: Any) -> None:
        if self._active and not in_backward():
            self._order.note(name, output)
