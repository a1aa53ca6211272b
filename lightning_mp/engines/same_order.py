"""Refuses ranks that gather other weights than one another, or in another order: they would wait for ever.

Compared are the first forward in training, the loss that comes of it, and the first forward in evaluation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
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

_END, _BACKWARD, _REDUCED = "the end of the step", "a backward pass", "a reduction over ranks, as self.log() makes one"


class FirstForward:
    """Compares the ranks in the first forwards of ``root``, until ``release``; each comparison is a device sync.

    ``gathers`` says of a unit that is about to run whether its weights have to be gathered.
    """

    def __init__(
        self,
        root: nn.Module,
        units: Mapping[str, nn.Module],
        device: torch.device,
        *,
        gathers: Callable[[nn.Module], bool] = lambda _unit: True,
        compiled: bool = False,
    ) -> None:
        self._names, self._device, self._gathers = [*units, _END, _BACKWARD, _REDUCED], device, gathers
        self._active, self._pending, self._known = False, False, set[bool]()
        #: of each unit that ran, the nodes from which its backward pass starts
        self._starts: dict[str, set[Any]] = {}
        eager: Any = torch.compiler.disable if compiled else _as_it_is
        hooks: list[RemovableHandle] = []
        for name, unit in units.items():
            hooks.append(unit.register_forward_pre_hook(eager(partial(self._enter, name)), prepend=True))
            hooks.append(unit.register_forward_hook(eager(partial(self._leave, name))))
        hooks.append(root.register_forward_pre_hook(self._begin, prepend=True))
        hooks.append(root.register_forward_hook(self._end))
        self._hooks = hooks

    def release(self) -> None:
        """Leave the modules."""
        while self._hooks:
            self._hooks.pop().remove()

    def before_backward(self, loss: Tensor) -> None:
        """Compare the units that contribute to the first loss.

        Raises:
            PlanError: on every rank, where they differ.
        """
        if not self._pending:
            return
        self._pending = False
        self._meet(_BACKWARD)
        reached = graph.nodes(loss)
        mine = [not reached.isdisjoint(self._starts.get(name, ())) for name in self._names]
        self._starts.clear()
        found = self._greatest([*map(int, mine), *(int(not one) for one in mine)])
        for name, some, not_all in zip(self._names, found, found[len(mine) :], strict=False):
            if some and not_all:
                raise PlanError([ranks_apart(f"a loss to which {name!r} contributes on some ranks only")])

    def before_reduction(self) -> None:
        """Before a collective of the user's within a step: other ranks have to be at it too."""
        if self._active:
            self._meet(_REDUCED)

    def _begin(self, root: nn.Module, _inputs: Any) -> None:
        self._active = root.training not in self._known
        self._known.add(root.training)
        self._pending = self._active and root.training

    def _end(self, *_: Any) -> None:
        if self._active:
            self._meet(_END)
        self._active = False

    def _enter(self, name: str, unit: nn.Module, _inputs: Any) -> None:
        if self._active and not in_backward() and self._gathers(unit):
            self._meet(name)

    def _leave(self, name: str, _unit: nn.Module, _inputs: Any, output: Any) -> None:
        if self._active and not in_backward():
            starts = self._starts.setdefault(name, set())
            starts.update(tensor.grad_fn for tensor in tensors_in(output) if tensor.grad_fn is not None)

    def _meet(self, name: str) -> None:
        """Be at ``name`` when all other ranks are; raise on every rank where they are not."""
        place = self._names.index(name)
        last, first = (abs(one) for one in self._greatest([place, -place]))
        if first != last:
            one, other = (f"at {self._names[index]!r}" for index in (first, last))
            raise PlanError([ranks_apart(f"a rank {one} when another is {other}")])

    def _greatest(self, numbers: list[int]) -> list[int]:
        there = torch.tensor(numbers, device=self._device)
        dist.all_reduce(there, op=dist.ReduceOp.MAX)
        return there.tolist()


def _as_it_is(hook: Any) -> Any:
    return hook


def ranks_apart(given: str) -> Fault:
    """What to say where ranks run different modules."""
    return Fault(
        f"{given}, with sharded weights, which all ranks gather and sum together",
        "the same modules in the same order on every rank, and in the loss of every rank",
        "run every one on every rank, and add 0 times what one does not need to its loss, or use strategy='mp_ddp' "
        "with find_unused_parameters=True",
    )
