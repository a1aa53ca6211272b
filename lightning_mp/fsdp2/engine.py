"""``ShardedEngine``: the optimizer step on sharded parameters, and checks of it.

The parameters are sharded by FSDP2, tensor parallelism or FSDP1.

A shard is unscaled, checked and stepped like a whole parameter. The gradient norm is a sum over all
shards. All ranks must gather the same weights in the same order. Otherwise they deadlock.
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
_USE_FSDP2 = "use strategy='mp_fsdp2'"
#: what torch says of an operator that is given a shard and a plain tensor
_MIXED = "mixed torch.Tensor and DTensor"
_MIXES_SHARDS = Fault(
    "code of the run computes with sharded weights and plain tensors together",
    fix="make averages and copies of weights in on_fit_start, as parameter.detach().clone(), which are sharded too; "
    "read a whole weight as parameter.full_tensor(); or use strategy='mp_ddp'",
)
_COMPUTES_WITH_PIECES = Fault("code of the run computes with weights that FSDP1 holds as flat pieces", fix=_USE_FSDP2)
_UNITS = (FSDPModule, FullyShardedDataParallel)


class ShardedEngine(StepEngine):
    """The step engine of a policy on sharded parameters."""

    evaluates_once = "on sharded parameters"
    steps = (("DTensors", "sharded parameters"),)

    #: the process groups over which FSDP1 splits gradients, empty under FSDP2
    _flat_groups: grads.Groups = ()
    _unused: sharding_compat.UnusedParameters | None = None
    _reads: ShardReads | None = None
    _skipped: SkippedUnits | None = None
    _flat: sharding_compat.FlatWeights | None = None

    def prepare(self, module: nn.Module) -> None:
        """Cast and convert the module in place, as the base class does.

        Raises:
            PlanError: a module's own ``_apply`` keeps a parameter in another dtype than the units
                were planned with.
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
        """Take the optimizers and the sharded ``model``, and patch its units until ``release``.

        Raises:
            PlanError: an optimizer cannot step sharded parameters.
        """
        self._flat_groups = flat_groups(model)
        self.steps = (("flat pieces", "sharded parameters"),) if self._flat_groups else ShardedEngine.steps
        super().connect(model, optimizers)
        self._unused = self._reads = self._skipped = self._flat = None
        if isinstance(model, FullyShardedDataParallel) and self._flat_groups:
            named = {id(parameter): plain_name(name) for name, parameter in model.named_parameters()}
            self._flat = sharding_compat.FlatWeights(model, named)
            self._connected.callback(self._flat.release)
        self._connected.callback(sharding_compat.Writes(model).release)
        if optimizers:
            self._connected.callback(sharding_compat.ShardGradients(model).release)
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

    def explain(self, error: BaseException) -> None:
        """Add a sentence to an error of torch's in code that computes with shards, or FSDP1's pieces, of weights."""
        if isinstance(error, PlanError) or not isinstance(error, (RuntimeError, IndexError)):
            return
        if _MIXED in str(error):
            error.args = (f"{error}\n{_MIXES_SHARDS}",)
        elif self._flat is not None and self._flat.explains(error):
            error.args = (f"{error}\n{_COMPUTES_WITH_PIECES}",)

    def on_trained_changed(self) -> None:
        """Raise RuntimeError under FSDP1 in an accumulation window: its gradients would be lost."""
        if self._flat_groups and self.pending:
            given = "parameters frozen or unfrozen within an accumulation window, with FSDP1"
            raise RuntimeError(str(Fault(given, fix="change them after a step, or use strategy='mp_fsdp2'")))

    def unscale(self, optimizer: Optimizer) -> None:
        """Sum partial gradients over ranks, then unscale and check the optimizer's gradients."""
        grads.sum_partial_(grads.parameters_of(optimizer))
        super().unscale(optimizer)

    def training_step(self) -> AbstractContextManager[Any]:
        """Return the context of a training step, and forget a layer stack's forward that failed."""
        if self._skipped is not None:
            self._skipped.begin_step()
        return super().training_step()

    def first_step(self, method: str) -> AbstractContextManager[Any]:
        """Return the base class's context of a step.

        If that is empty and ``ShardReads.needed``, return the ``ShardReads``: code of the step
        takes a weight's shape.
        """
        around = super().first_step(method)
        return self._reads if around is NOTHING and self._reads and self._reads.needed else around

    @contextmanager
    def _first_step(self, module: nn.Module) -> Generator[None, None, None]:
        with super()._first_step(module), self._reads or NOTHING:
            if self._flat is not None:
                self._flat.start()
            yield
            if self._flat is not None:
                self._refuse_written(self._flat)
                if not torch.is_grad_enabled():  # else a backward pass follows, after which weights are sharded
                    self._flat.stop()

    def _refuse_written(self, flat: sharding_compat.FlatWeights) -> None:
        """Raise a PlanError on every rank if a user wrote to a gathered weight on one of them. A collective."""
        mine = sorted(flat.written)
        ranks = apart([int(bool(mine))], self.device, mine=(mine,)) or [(mine,)]
        written = sorted({name for (names,) in ranks for name in names})
        if written:
            raise PlanError.of(
                f"{written[0]!r} written to in a step, with FSDP1, which drops what is written to gathered weights",
                _USE_FSDP2,
            )

    def after_backward(self) -> None:
        """Finish the backward pass: every rank must call it.

        Parameters that no rank used lose their gradient. Under manual optimization, partial
        gradients are summed and unscaled, because users clip before they step.

        Raises:
            PlanError: a shard unit ran on some ranks only.
        """
        if self._flat is not None and self._flat.watches:
            self._refuse_written(self._flat)
            self._flat.stop()
        if self._unused is not None:
            self._unused.finish_backward()
        if self.manual:
            grads.sum_partial_(self._all_parameters)
        super().after_backward()

    def release(self) -> None:
        """Release the module as the base class does, and reset FSDP2's units.

        A failed step leaves the units in the midst of it.
        """
        if self._module is not None:
            sharding_compat.reset_units(self._module)
        super().release()
        self._reads = self._unused = self._skipped = self._flat = None

    def clip_norm(self, optimizer: Optimizer, max_norm: float) -> None:
        """Clip by the global 2-norm over all shards, in fp32. Note it in ``last_norm``.

        A collective.
        """
        parameters = grads.parameters_of(optimizer)
        self.last_norm = grads.global_norm(parameters, self.device, self._flat_groups)
        grads.clip_to_(parameters, max_norm, self.last_norm)


def flat_groups(model: nn.Module | None) -> grads.Groups:
    """Return the process group over which FSDP1 splits ``model``, in a tuple.

    Any other model has an empty tuple.
    """
    if not isinstance(model, FullyShardedDataParallel):
        return ()
    group = model.process_group
    sharded = model.sharding_strategy is not ShardingStrategy.NO_SHARD
    return (group,) if group is not None and sharded and group.size() > 1 else ()


def _reshard_before_step(units: sharding_compat.Units, *_step: Any) -> None:
    """Reshard all weights before an optimizer steps, because the step changes the shards.

    A forward pass between the backward pass and the step leaves the root's weights gathered. Within
    a backward pass nothing is resharded, because that pass still needs the weights.
    """
    if not in_backward():
        units.reshard()


# ------------------------------------------------------------------ checks in the step


class WholeNorms(TorchFunctionMode):
    """A torch function mode: ``Tensor.norm`` of a DTensor is the norm of the whole tensor.

    Lightning logs gradient norms with it. The call is a collective for a sharded tensor.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result.full_tensor() if func is _NORM and isinstance(result, DTensor) else result


def sum_total_norms(engine: StepEngine, groups: Callable[[], grads.Groups]) -> AbstractContextManager[None]:
    """Return a context in which ``clip_grad_norm_`` takes the norm over ``groups``.

    It then is a collective, for gradients of the engine's optimizers and for an empty list. Other
    gradients are clipped by torch's own norm.
    """

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
    """A torch function mode that refuses to compute with the shard of a weight.

    Torch would compute with the shard, or fail later without the weight's name. A function that
    reads only a weight's whole shape or dtype returns a plain tensor, as under DDP.
    ``weight.new_zeros(...)`` is an example.

    Args:
        module: the module that names the weights.
        pieces: this rank's shards. ``None``: every parameter of ``module``.
        away: return True if the weight of a shard is sharded at the moment.

    Raises:
        PlanError: from a call in the mode, if it fails on such a shard, or if its result requires a
            gradient.
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
        #: True after a function took the shape or dtype of a sharded weight: the mode is then
        #: entered in every step
        self.needed = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # x.type_as(weight) and x.to(weight) read no value of the weight
        first, others = (args[:1], args[1:]) if func in _CASTS_AS else ((), args)
        # in training without gradients, an optimizer makes its state, which has to be sharded as
        # the weight is
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
    """Return the PlanError for a step that uses the weight ``name`` while it is sharded."""
    return PlanError.of(
        f"{name!r} used in the step outside of the unit that holds it, whose weights are sharded there",
        "call the module, or compute with the weight in its forward; pin or wrap what reads it, not it alone; or use "
        "strategy='mp_ddp'",
    )


class FirstForward:
    """Hooks that check that all ranks enter the same ``units`` in the same order.

    The first forward of ``root`` in training and the first in evaluation are checked, until
    ``release``. Ranks compare at each unit for which ``gathers`` is True, and at the end of the
    forward. If ``again``, they also compare at the end of each later forward in training, before
    backward gathers. Each comparison is a collective and a device sync. It raises PlanError on
    every rank if ranks differ.

    Args:
        root: the module whose forward is the step.
        units: the units by name.
        device: the device on which ranks compare.
        gathers: return True if entering the unit gathers weights.
        compiled: True if a part of ``root`` is compiled. The hooks then stay eager.
        again: compare in later training forwards too.
        group: the process group of the comparison, ``None`` for all ranks.
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
        #: the number of nested forwards of the root: 2 if a step calls ``self(x)``
        self._depth = 0
        #: the values of ``root.training`` whose first forward was compared
        self._known = set[bool]()
        #: the indices in ``_names`` of the entered units, in order
        self._entered: list[int] = []
        self._places = {id(unit): place for place, unit in enumerate(units.values())}
        eager: Any = torch.compiler.disable if compiled else lambda hook: hook  # type: ignore[misc]
        watched = [(unit, eager(partial(self._enter, place))) for place, unit in enumerate(units.values())]
        before = [*watched, (root, self._begin)]
        self._hooks = [module.register_forward_pre_hook(hook, prepend=True) for module, hook in before]
        self._hooks.append(root.register_forward_hook(self._end))

    def release(self) -> None:
        """Remove the hooks."""
        while self._hooks:
            self._hooks.pop().remove()

    def note(self, unit: nn.Module) -> None:
        """Treat ``unit`` as entered, because an idle forward gathers it.

        Ranks may compare: see the class.
        """
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
        """Raise PlanError on every rank if ranks entered different units. A collective.

        A rank that is at the end of the step earlier than another one differs too.
        """
        ranks = apart(self._entered, self._device, self._group)
        for places in zip_longest(*ranks, fillvalue=len(self._names) - 1):
            if len(set(places)) > 1:
                first, last = self._names[min(places)], self._names[max(places)]
                raise ranks_apart(f"a rank at {first!r} when another is at {last!r}")
