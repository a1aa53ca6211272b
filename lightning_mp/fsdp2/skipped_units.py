"""``SkippedUnits``: gather units that this rank leaves out of a training forward (LayerDrop)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from lightning_mp.compat.torch import in_backward
from lightning_mp.compat.torch_sharding import enter_unit, leave_unit, ranks_apart, seen_as_whole
from lightning_mp.modules.patterns import has_own_forward, named_submodules, original_class
from lightning_mp.numerics.dtypes import map_tensors, tensors_in

#: if a forward runs only one of this many modules or more, the modules are heads, not layers
_MANY = 8


class Stack:
    """The units of one ``ModuleList`` in order, and how far the forward of ``parent`` is."""

    def __init__(self, parent: nn.Module, layers: Sequence[nn.Module]) -> None:
        self.parent, self.layers = parent, list(layers)
        #: for each layer, the units inside it
        self.inside = [
            [part for part in layer.modules() if isinstance(part, FSDPModule) and part is not layer] for layer in layers
        ]
        #: for each forward of the root and the parent under way: the index of the last entered
        #: layer, -1 before any
        self.passed = [-1]
        #: the index of the running layer, and the order in which units inside a layer were entered
        self.running: int | None = None
        self.order: list[int] = []
        #: True if layers are entered in order. ``decided`` is True after the first step.
        self.in_order = True
        self.decided = False
        #: True after a forward ran only one of many modules, which are then heads
        self.picks_one = False
        #: True if a layer has several inputs with gradients, such as a decoder's layer
        self.joins = False
        self._entered = 0
        #: True after a forward ran a layer. A later forward without any has left all of them out.
        self._ran = False

    def enter(self, place: int) -> list[int]:
        """Note that the layer at ``place`` is entered.

        Return the indices of skipped layers before it.

        The list is empty if layers do not run in order. If ``parent`` starts over, it has the rest
        of the stack too.
        """
        last = self.passed[-1]
        self.passed[-1] = self.running = place
        self._entered += 1
        if 0 < place < last and not self.decided:
            self.in_order = False
        if not self.in_order:
            return []
        if place >= last:
            return [*range(last + 1, place)]
        return [*range(last + 1, len(self.layers)), *range(place)]  # the parent runs them once more

    def end(self) -> list[int]:
        """Note that a forward is over. Return the indices of the skipped layers at its end.

        The list is empty if layers do not run in order, and if no forward has run a layer yet.
        """
        last = self.passed.pop()
        self.running = None
        if last < 0 and not self._ran:
            return []
        self._ran = True
        self.picks_one |= self._entered == 1 and len(self.layers) >= _MANY
        self._entered = 0
        return [*range(last + 1, len(self.layers))] if self.in_order else []


class SkippedUnits:
    """Hooks by which every rank gathers every layer of a stack in training.

    A stack is a ``ModuleList`` of units of one class that run in order. Hugging Face's speech
    models drop its layers at random, by rank. The inputs of a dropped layer pass through it
    unchanged. Its weights are then gathered, and its gradients reduced, at the same point as on
    other ranks. ``UnusedParameters`` takes the gradient away from a layer that no rank uses.

    Args:
        root: the module whose forward is the step.
        device: the device of the all-reduce after the first step.
        notes: functions that are called with each unit before an idle forward of it.

    Raises:
        PlanError: from a forward, if a skipped layer cannot be passed through.
    """

    def __init__(self, root: nn.Module, device: torch.device, notes: Sequence[Callable[[nn.Module], None]]) -> None:
        self._device, self._notes = device, notes
        self._stacks = list[Stack]()
        self._patches = ExitStack()
        for parent, layers in _module_lists(root):
            units = [layer for layer in layers if isinstance(layer, FSDPModule)]
            if len(units) == len(layers):
                self._stacks.append(Stack(parent, layers))
            if len(units) == len(layers) or not any(_has_units(layer) for layer in layers):
                self._patches.enter_context(seen_as_whole(parent))
        #: True after the ranks agreed which stacks run in order
        self._agreed = False
        self._hooks: list[Any] = []
        for stack in self._stacks:
            self._watch(stack, root)
        if self._stacks:
            self._hooks.append(root.register_forward_pre_hook(self._begin_root, prepend=True))
            self._hooks.append(root.register_forward_hook(self._end_root, prepend=True))

    def release(self) -> None:
        """Remove the hooks and patches."""
        self._patches.close()
        while self._hooks:
            self._hooks.pop().remove()

    def begin_step(self) -> None:
        """Forget a forward that failed in an earlier step."""
        for stack in self._stacks:
            stack.passed, stack.running = [-1], None

    def _watch(self, stack: Stack, root: nn.Module) -> None:
        hooks = self._hooks
        for place, layer in enumerate(stack.layers):
            enter: Any = partial(self._enter, stack, place)
            hooks.append(layer.register_forward_pre_hook(enter, prepend=True, with_kwargs=True))
            hooks.append(layer.register_forward_hook(partial(self._leave, stack)))
            for number, unit in enumerate(stack.inside[place]):
                enter = partial(self._enter_inside, stack, place, number)
                hooks.append(unit.register_forward_pre_hook(enter, prepend=True))
        # A step may be several forwards of the root, so the root has hooks of its own.
        if stack.parent is not root:
            begin: Any = partial(self._begin, stack)
            end: Any = partial(self._end, stack)
            hooks.append(stack.parent.register_forward_pre_hook(begin, prepend=True))
            hooks.append(stack.parent.register_forward_hook(end, prepend=True))

    def _begin(self, stack: Stack, parent: nn.Module, _inputs: Any) -> None:
        if parent.training and not in_backward():
            stack.passed.append(-1)

    def _enter(self, stack: Stack, place: int, layer: nn.Module, inputs: Any, named: Any) -> Any:
        if not layer.training or in_backward():
            return None
        stack.joins |= sum(tensor.requires_grad for tensor in tensors_in((inputs, named))) > 1
        return self._pass(stack, stack.enter(place), (inputs, named))

    def _leave(self, stack: Stack, *_: Any) -> None:
        stack.running = None

    def _enter_inside(self, stack: Stack, place: int, number: int, unit: nn.Module, _inputs: Any) -> None:
        if stack.running == place and number not in stack.order:
            stack.order.append(number)

    def _end(self, stack: Stack, parent: nn.Module, _inputs: Any, output: Any) -> Any:
        """Return the parent's output, passed through its last skipped layers. ``None``: no change.

        Raises:
            PlanError: this rank left out every layer of a stack whose layers have several inputs.
        """
        if not parent.training or in_backward():
            return None
        left_out = stack.end()
        if stack.joins and len(left_out) == len(stack.layers):  # other inputs would get no gradient
            raise ranks_apart(f"a rank that leaves out every layer of a {original_class(parent).__name__}")
        return self._pass(stack, left_out, output)

    def _pass(self, stack: Stack, places: list[int], data: Any) -> Any:
        """Return ``data`` with its floating tensors passed through the layers at ``places``.

        Without ``places`` return ``None``, which a hook returns to change nothing.
        """
        if not places:
            return None
        tensors = tensors_in(data)
        through = [tensor for tensor in tensors if tensor.is_floating_point()]
        passed = through
        for place in places:
            passed = self._through(stack, place, passed)
        new = {id(old): tensor for old, tensor in zip(through, passed, strict=True)}
        return map_tensors(data, lambda tensor: new.get(id(tensor), tensor))

    def _through(self, stack: Stack, place: int, tensors: list[Tensor]) -> list[Tensor]:
        """Return ``tensors`` after an idle forward of a layer and the units in it. A collective.

        Raises:
            PlanError: the order of the units inside is not known, because no layer has run yet.
        """
        layer, inside = stack.layers[place], stack.inside[place]
        if len(stack.order) < len(inside):
            raise ranks_apart("a layer left out before any layer of its kind ran, with shard units inside of it")
        tensors = self._enter_idle(layer, tensors)
        for number in stack.order:
            tensors = leave_unit(inside[number], self._enter_idle(inside[number], tensors))
        return leave_unit(layer, tensors)

    def _enter_idle(self, unit: nn.Module, tensors: list[Tensor]) -> list[Tensor]:
        for note in self._notes:
            note(unit)
        return enter_unit(unit, tensors)

    def _begin_root(self, root: nn.Module, _inputs: Any) -> None:
        if root.training and not in_backward():
            for stack in self._stacks:
                stack.passed.append(-1)

    def _end_root(self, root: nn.Module, _inputs: Any, output: Any) -> Any:
        """Return the output, passed through the last layers of stacks that the root runs itself.

        In the first step this is a collective: see ``_agree``.
        """
        if not root.training or in_backward():
            return None
        changed = output
        for stack in self._stacks:
            if stack.passed[-1] < 0:  # its parent ran it, or no module did
                stack.passed.pop()
                continue
            passed = self._pass(stack, stack.end(), changed)
            changed = changed if passed is None else passed
        if not self._agreed and all(len(stack.passed) == 1 for stack in self._stacks):
            self._agree()
        return changed

    def _agree(self) -> None:
        """Decide on every rank alike which stacks run in order, after the first step.

        A stack does if at least one rank saw its layers in order and no sign of heads. From then on
        no rank gathers the skipped layers of other stacks. A collective.
        """
        self._agreed = True
        flags = [float(stack.in_order and not stack.picks_one) for stack in self._stacks]
        agreed = torch.tensor(flags, device=self._device)
        dist.all_reduce(agreed, op=dist.ReduceOp.MAX)
        for stack, in_order in zip(self._stacks, agreed.tolist(), strict=True):
            stack.in_order, stack.decided = bool(in_order), True


def _has_units(module: nn.Module) -> bool:
    return any(isinstance(part, FSDPModule) for part in module.modules())


def _module_lists(root: nn.Module) -> Iterator[tuple[nn.Module, list[nn.Module]]]:
    """Yield each ``ModuleList`` of two or more modules of one class.

    A pair is the module whose forward runs them, and the modules.
    """
    named = {"": root, **dict(named_submodules(root))}
    for name, module in named.items():
        layers = list(dict.fromkeys(module.children())) if isinstance(module, nn.ModuleList) else []
        if len(layers) > 1 and len({original_class(layer) for layer in layers}) == 1:
            around = name
            while around and not has_own_forward(named[around]):
                around = around.rpartition(".")[0]
            yield named[around], layers
