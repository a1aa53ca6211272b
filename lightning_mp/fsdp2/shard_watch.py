"""What is watched while weights are sharded: norms of gradients, reads outside of a unit, and that ranks run the same.

Ranks that gather other weights than one another, or in another order, would wait for ever.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from itertools import zip_longest
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from lightning_mp.compat.torch import in_backward
from lightning_mp.compat.torch_sharding import ranks_apart, take_total_norms_by
from lightning_mp.errors import PlanError
from lightning_mp.modules.half_weights import reads_no_value
from lightning_mp.numerics import grads
from lightning_mp.numerics.dtypes import map_tensors, tensors_in
from lightning_mp.plan.alike import extremes
from lightning_mp.plan.engine import StepEngine

_NORM: Any = Tensor.norm
_CASTS_AS = (Tensor.type_as, Tensor.to)
_END = "the end of the step"


class WholeNorms(TorchFunctionMode):
    """Within it, the norm of a gradient of which this rank has a shard is that of the whole, also Lightning's."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result.full_tensor() if func is _NORM and isinstance(result, DTensor) else result


def sum_total_norms(engine: StepEngine, groups: Callable[[], grads.Groups]) -> Callable[[], None]:
    """Have ``clip_grad_norm_`` clip the engine's gradients by the norm over ``groups``; what is returned ends that."""

    def total(
        own: Callable[..., Tensor],
        tensors: Any,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Tensor:
        members: list[Tensor] = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        held = {id(p.grad) for optimizer in engine.optimizers for p in grads.parameters_of(optimizer)}
        if members and not any(id(member) in held for member in members):
            return own(members, norm_type, error_if_nonfinite, foreach)
        norm = own(members, norm_type, False, foreach)
        whole = norm.full_tensor() if isinstance(norm, DTensor) else norm
        plain = torch.as_tensor(whole, dtype=torch.float32, device=engine.device)
        return grads.over_shards(plain, norm_type, groups(), error_if_nonfinite=error_if_nonfinite)

    return take_total_norms_by(total)


class ShardReads(TorchFunctionMode):
    """Within it, what is computed from the piece of a weight, of which a gradient would be taken, is refused.

    Torch would go on with the piece, or fail later without a name. What takes a weight's shape or dtype alone, as
    ``weight.new_zeros(...)`` does, gives a plain tensor, as under DDP.

    Args:
        names: of parameters, by ``id``.
        away: whether one of them is sharded at that moment.
    """

    def __init__(self, names: Mapping[int, str], away: Callable[[Tensor], bool] = lambda _piece: True) -> None:
        super().__init__()
        self._names, self._away = names, away
        #: a step took such a result: every one does
        self.needed = False
        self.training = True

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # of what is cast like a second tensor, the values of that one are not read
        first, others = (args[:1], args[1:]) if func in _CASTS_AS else ((), args)
        # without gradients in training an optimizer makes its state, which is sharded as the weight is
        stepping = self.training and not torch.is_grad_enabled()
        if not stepping and (first or reads_no_value(getattr(func, "__name__", ""))):
            plain = map_tensors([others, kwargs], self._without_values)
            self.needed |= plain[0] is not others
            args, kwargs = (*first, *plain[0]), plain[1]
        given = tensors_in([args, kwargs or {}])
        name = next((self._names[id(one)] for one in given if id(one) in self._names and self._away(one)), None)
        try:
            result = func(*args, **(kwargs or {}))
        except RuntimeError as error:
            if name is not None:
                raise _refused(name) from error
            raise
        if name is not None and isinstance(result, Tensor) and result.requires_grad and result is not given[0]:
            raise _refused(name)
        return result

    def _without_values(self, one: Tensor) -> Tensor:
        if id(one) not in self._names or not isinstance(one, DTensor):
            return one
        return one.to_local().detach().new_empty(()).expand(one.shape)


def _refused(name: str) -> PlanError:
    return PlanError.of(
        f"{name!r} used in the step outside of the unit that holds it, whose weights are sharded there",
        "call the module, or compute with the weight in its forward; pin or wrap what reads it, not it alone; or use "
        "strategy='mp_ddp'",
    )


class FirstForward:
    """Compares the ranks in the first forwards of ``root``, until ``release``; each comparison is a device sync.

    ``gathers`` says of a unit that is about to run whether its weights have to be gathered. ``again``: each later
    forward in training is compared at its end, before the backward pass gathers what a rank has used. ``group`` is over
    whom, on ``device``; ``None``: all.
    """

    def __init__(
        self,
        root: nn.Module,
        units: Mapping[str, nn.Module],
        device: torch.device,
        *,
        gathers: Callable[[nn.Module], bool] = lambda _unit: True,
        compiled: bool = False,
        again: bool = False,
        group: Any = None,
    ) -> None:
        self._again, self._entered, self._group = again, list[str](), group
        self._names, self._device, self._gathers = [*units, _END], device, gathers
        self._active, self._known = False, set[bool]()
        eager: Any = torch.compiler.disable if compiled else lambda hook: hook  # type: ignore[misc]
        self._hooks: list[RemovableHandle] = [
            *(
                one.register_forward_pre_hook(eager(partial(self._enter, name)), prepend=True)
                for name, one in units.items()
            ),
            root.register_forward_pre_hook(self._begin, prepend=True),
            root.register_forward_hook(self._end),
        ]

    def release(self) -> None:
        """Leave the modules."""
        while self._hooks:
            self._hooks.pop().remove()

    def _begin(self, root: nn.Module, _inputs: Any) -> None:
        self._active = root.training not in self._known
        self._known.add(root.training)
        self._entered.clear()

    def _end(self, root: nn.Module, *_: Any) -> None:
        if self._active:
            self._compare(_END)
        elif self._again and root.training:
            self._compare_entered()
        self._active = False

    def _enter(self, name: str, unit: nn.Module, _inputs: Any) -> None:
        if self._again and not in_backward():
            self._entered.append(name)
        if self._active and not in_backward() and self._gathers(unit):
            self._compare(name)

    def _compare(self, name: str) -> None:
        """Be at ``name`` when all other ranks are; raise on every rank where they are not."""
        (first,), (last,) = extremes([self._names.index(name)], self._device, self._group)
        if first != last:
            one, other = (f"at {self._names[index]!r}" for index in (first, last))
            raise PlanError([ranks_apart(f"a rank {one} when another is {other}")])

    def _compare_entered(self) -> None:
        smallest, largest = extremes([crc32(repr(self._entered).encode())], self._device, self._group)
        if smallest != largest:
            ranks: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(ranks, [*self._entered, _END])
            at = next(set(places) for places in zip_longest(*ranks, fillvalue=_END) if len(set(places)) > 1)
            one, other, *_ = (f"at {name!r}" for name in sorted(at, key=self._names.index))
            raise PlanError([ranks_apart(f"a rank {one} when another is {other}")])
