"""The step where each rank holds a shard of every parameter: FSDP2, tensor parallel, FSDP1; and what is watched there.

A shard is unscaled, checked and stepped as a whole parameter is; the norm and the replay have to know of the others.
Ranks that gather other weights than one another, or in another order, would wait for ever.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, ShardingStrategy
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode

from lightning_mp.compat import torch_sharding as sharding_compat
from lightning_mp.compat.torch import in_backward, is_compiled
from lightning_mp.compat.torch_sharding import ranks_apart
from lightning_mp.errors import Fault, PlanError, counted, pinning
from lightning_mp.fsdp2.skipped_units import SkippedUnits
from lightning_mp.modules.half_weights import reads_no_value
from lightning_mp.modules.patterns import original_class, plain_name
from lightning_mp.numerics import grads
from lightning_mp.numerics.dtypes import is_plain, map_tensors, tensors_in
from lightning_mp.plan.alike import apart
from lightning_mp.plan.engine import NOTHING, StepEngine

_NORM: Any = Tensor.norm
_CASTS_AS = (Tensor.type_as, Tensor.to)
_UNITS = (FSDPModule, FullyShardedDataParallel)


class ShardedEngine(StepEngine):
    """Carries a policy out on sharded parameters."""

    evaluates_once = "on sharded parameters"
    steps = (("DTensors", "sharded parameters"),)

    #: the groups that plain gradients are split over
    _flat_groups: grads.Groups = ()
    _unused: sharding_compat.UnusedParameters | None = None
    _reads: ShardReads | None = None
    _skipped: SkippedUnits | None = None

    def prepare(self, module: nn.Module) -> None:
        """Change the module as the base class does.

        Raises:
            PlanError: a module's own ``_apply`` keeps a parameter in another dtype. Units were laid out without it.
        """
        stored = self.stored_dtypes()
        expected = [(name, parameter, stored(parameter)) for name, parameter in module.named_parameters()]
        super().prepare(module)
        kept = [name for name, parameter, dtype in expected if is_plain(parameter) and parameter.dtype != dtype]
        if kept:
            owner = module.get_submodule(kept[0].rpartition(".")[0])
            pins = pinning([original_class(owner).__name__], under_plan=True)
            given = (
                f"{counted(len(kept), 'parameter')} kept in fp32 by an _apply of the module's own, such as {kept[0]!r}"
            )
            raise PlanError.of(
                f"{given}, on sharded parameters, whose units have one dtype",
                f"pin the module under strategy='mp_fsdp2': {pins}; or use strategy='mp_ddp'",
            )

    def connect(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        self._flat_groups = flat_groups(model)
        self.steps = (("flat pieces", "sharded parameters"),) if self._flat_groups else ShardedEngine.steps
        super().connect(model, optimizers)
        self._unused = self._reads = self._skipped = None
        self._connected.callback(sharding_compat.Writes(model).release)
        if optimizers:
            self._connected.callback(sharding_compat.sync_hooks_and_requires_grad(model))
            reshard = partial(_reshard_before_step, sharding_compat.Units(model))
            self._connected.callback(register_optimizer_step_pre_hook(reshard).remove)
            if self._flat_groups:
                self._connected.enter_context(sum_total_norms(self, lambda: self._flat_groups))
        if self.distributed:
            self.hook_watch = WholeNorms()
            below = [named for named in model.named_modules() if named[0]]
            units: dict[str, Any] = {plain_name(name): part for name, part in below if isinstance(part, _UNITS)}
            compiled = any(map(is_compiled, model.modules()))
            self._reads = None if compiled else ShardReads(model, sharding_compat.shards(model))
            first_forward = FirstForward(model, units, self.device, compiled=compiled)
            self._connected.callback(first_forward.release)
            if optimizers:
                self._unused = sharding_compat.UnusedParameters(model, self.device)
                self._connected.callback(self._unused.release)
            if self._unused is not None and not compiled:
                notes = first_forward.note, self._unused.note_passed
                self._skipped = SkippedUnits(model, self.device, notes)
                self._connected.callback(self._skipped.release)

    def on_trained_changed(self) -> None:
        """Raise a RuntimeError within an accumulation window under FSDP1, whose flat gradients would lose it."""
        if self._flat_groups and self.pending:
            given = "parameters frozen or unfrozen within an accumulation window, with FSDP1"
            raise RuntimeError(str(Fault(given, fix="change them after a step, or use strategy='mp_fsdp2'")))

    def unscale(self, optimizer: Optimizer) -> None:
        grads.sum_partial_(grads.parameters_of(optimizer))
        super().unscale(optimizer)

    def training_step(self) -> AbstractContextManager[Any]:
        """As in the base class."""
        if self._skipped is not None:
            self._skipped.begin_step()
        return super().training_step()

    def first_step(self, method: str) -> AbstractContextManager[Any]:
        """As in the base class; what takes the shape of a sharded weight is seen to in every step."""
        around = super().first_step(method)
        return self._reads if around is NOTHING and self._reads and self._reads.needed else around

    @contextmanager
    def _first_step(self, module: nn.Module) -> Generator[None, None, None]:
        with super()._first_step(module), self._reads or NOTHING:
            yield

    def after_backward(self) -> None:
        """Reduce partial gradients, and unscale them, before users look at them."""
        if self._unused is not None:
            self._unused.finish_backward()
        if self.manual:
            grads.sum_partial_(self._all_parameters)
        super().after_backward()

    def release(self) -> None:
        """Let go of FSDP2's units too, as a new run finds them also after a failure, and of what was shadowed."""
        if self._module is not None:
            sharding_compat.reset_units(self._module)
        super().release()
        self._reads = self._unused = self._skipped = None

    def clip_norm(self, optimizer: Optimizer, max_norm: float) -> None:
        """Clip by the norm over all shards, in fp32."""
        parameters = grads.parameters_of(optimizer)
        self.last_norm = grads.global_norm(parameters, self.device, self._flat_groups)
        grads.clip_to_(parameters, max_norm, self.last_norm)


def flat_groups(model: nn.Module | None) -> grads.Groups:
    """The process group over which FSDP1 splits flat parameters, if it does."""
    if not isinstance(model, FullyShardedDataParallel):
        return ()
    group = model.process_group
    sharded = model.sharding_strategy is not ShardingStrategy.NO_SHARD
    return (group,) if group is not None and sharded and group.size() > 1 else ()


def _reshard_before_step(units: sharding_compat.Units, *_step: Any) -> None:
    """Free gathered weights before an optimizer steps, because it changes the shards.

    A forward pass between the backward pass and the step leaves the root's weights gathered. An optimizer that steps
    in a backward pass is left alone, because that pass still needs them.
    """
    if not in_backward():
        units.reshard()


# ------------------------------------------------------------------ what is watched


class WholeNorms(TorchFunctionMode):
    """Within it, the norm of a gradient of which this rank has a shard is that of the whole, also Lightning's."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result.full_tensor() if func is _NORM and isinstance(result, DTensor) else result


def sum_total_norms(engine: StepEngine, groups: Callable[[], grads.Groups]) -> AbstractContextManager[None]:
    """Within, ``clip_grad_norm_`` clips the engine's gradients by the norm over ``groups``."""

    def total(
        own: Callable[..., Tensor],
        tensors: Any,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Tensor:
        members: list[Tensor] = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        held = {id(p.grad) for optimizer in engine.optimizers for p in grads.parameters_of(optimizer)}
        if members and held.isdisjoint(map(id, members)):
            return own(members, norm_type, error_if_nonfinite, foreach)
        norm = own(members, norm_type, False, foreach)
        whole = norm.full_tensor() if isinstance(norm, DTensor) else norm
        plain = torch.as_tensor(whole, dtype=torch.float32, device=engine.device)
        return grads.over_shards(plain, norm_type, groups(), error_if_nonfinite=error_if_nonfinite)

    return sharding_compat.total_norms_by(total)


class ShardReads(TorchFunctionMode):
    """Within it, what is computed from the piece of a weight, of which a gradient would be taken, is refused.

    Torch would go on with the piece, or fail later without a name. What takes a weight's shape or dtype alone, as
    ``weight.new_zeros(...)`` does, gives a plain tensor, as under DDP.

    ``pieces`` are what this rank holds of weights (``None``: every parameter), ``away`` says whether one of them is
    sharded at that moment.
    """

    def __init__(
        self,
        module: nn.Module,
        pieces: Iterable[Tensor] | None = None,
        away: Callable[[Tensor], bool] = lambda _piece: True,
    ) -> None:
        super().__init__()
        held = set(map(id, module.parameters() if pieces is None else pieces))
        self._names = {id(one): plain_name(name) for name, one in module.named_parameters() if id(one) in held}
        self._module, self._away = module, away
        #: a step took such a result: every one does
        self.needed = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # of what is cast like a second tensor, the values of that one are not read
        first, others = (args[:1], args[1:]) if func in _CASTS_AS else ((), args)
        # without gradients in training an optimizer makes its state, which is sharded as the weight is
        stepping = self._module.training and not torch.is_grad_enabled()
        if not stepping and (first or reads_no_value(getattr(func, "__name__", ""))):
            plain = map_tensors([others, kwargs], self._without_values)
            self.needed |= plain[0] is not others
            args, kwargs = (*first, *plain[0]), plain[1]
        given = tensors_in([args, kwargs or {}])
        name = next((self._names[id(one)] for one in given if id(one) in self._names and self._away(one)), None)
        try:
            result = func(*args, **(kwargs or {}))
        except RuntimeError as error:
            if name is None:
                raise
            raise _refused(name) from error
        if name is not None and isinstance(result, Tensor) and result.requires_grad and result is not given[0]:
            raise _refused(name)
        return result

    def _without_values(self, tensor: Tensor) -> Tensor:
        if id(tensor) not in self._names or not isinstance(tensor, DTensor):
            return tensor
        return tensor.to_local().detach().new_empty(()).expand(tensor.shape)


def _refused(name: str) -> PlanError:
    return PlanError.of(
        f"{name!r} used in the step outside of the unit that holds it, whose weights are sharded there",
        "call the module, or compute with the weight in its forward; pin or wrap what reads it, not it alone; or use "
        "strategy='mp_ddp'",
    )


class FirstForward:
    """Compares which ``units`` the ranks enter, and in which order, until ``release``; each time is a device sync.

    In the first forward of ``root`` in training, and the first in evaluation, at each unit whose weights it has to
    gather; with ``again`` also at the end of each later one in training, before backward gathers what a rank has used.
    The hooks are not compiled where a part is ``compiled``.
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
        self._names, self._device, self._group = [*units, "the end of the step"], device, group
        self._gathers, self._again = gathers, again
        self._active = False
        #: how many forwards of the root are under way: a step that calls ``self(x)`` is one, with one inside
        self._depth = 0
        #: the modes, training or not, of which the first forward was compared
        self._known = set[bool]()
        #: the places in ``_names`` of the units that were entered, in their order
        self._entered: list[int] = []
        self._places = {id(unit): place for place, unit in enumerate(units.values())}
        eager: Any = torch.compiler.disable if compiled else lambda hook: hook  # type: ignore[misc]
        watched = [(unit, eager(partial(self._enter, place))) for place, unit in enumerate(units.values())]
        before = [*watched, (root, self._begin)]
        self._hooks = [module.register_forward_pre_hook(hook, prepend=True) for module, hook in before]
        self._hooks.append(root.register_forward_hook(self._end))

    def release(self) -> None:
        """Leave the modules."""
        while self._hooks:
            self._hooks.pop().remove()

    def note(self, unit: nn.Module) -> None:
        """Note that a unit is gathered for a forward that does nothing."""
        self._enter(self._places[id(unit)], unit, ())

    def _begin(self, root: nn.Module, _inputs: Any) -> None:
        self._depth += 1
        if self._depth > 1:
            return
        self._active = root.training not in self._known
        self._known.add(root.training)
        self._entered.clear()

    def _end(self, root: nn.Module, *_: Any) -> None:
        self._depth -= 1
        if self._depth > 0:
            return
        if self._active or (self._again and root.training):
            self._compare()
        self._active = False

    def _enter(self, place: int, unit: nn.Module, _inputs: Any) -> None:
        if (self._active or self._again) and not in_backward():
            self._entered.append(place)
            if self._active and self._gathers(unit):
                self._compare()

    def _compare(self) -> None:
        """Raise on every rank where one has entered another unit than this one, or is at the end before it."""
        ranks = apart(self._entered, self._device, self._group)
        for places in zip_longest(*ranks, fillvalue=len(self._names) - 1):
            if len(set(places)) > 1:
                first, last = self._names[min(places)], self._names[max(places)]
                raise ranks_apart(f"a rank at {first!r} when another is at {last!r}")
