"""torch's private names around sharding (DDP, FSDP2, FSDP1), each behind a function that says what it is for."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from importlib import import_module
from operator import methodcaller
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lightning_mp.compat import patched
from lightning_mp.compat.torch import in_backward
from lightning_mp.errors import PlanError

if TYPE_CHECKING:
    from typing_extensions import Self

# ------------------------------------------------------------------ DDP


def register_comm_hooks(model: Any) -> bool:
    """Give DDP's reducer, which is new, the communication hooks that the last one had; whether there are any."""
    for hook, state in model._comm_hooks:
        cast("Any", dist)._register_comm_hook(model.reducer, state, hook)
    return bool(model._comm_hooks)


# ------------------------------------------------------------------ FSDP2


def policies(model: nn.Module) -> Iterator[tuple[str, Any, torch.dtype]]:
    """Each unit's name and ``MixedPrecisionPolicy``, and the dtype its trainable parameters are stored in."""
    for name, unit in model.named_modules():
        if isinstance(unit, FSDPModule):
            held = (one.sharded_param for group in _groups_of(unit) for one in group.fsdp_params)
            stored = next((parameter.dtype for parameter in held if parameter.requires_grad), None)
            if stored is not None:
                yield name, _state(unit)._mp_policy, stored


class _TwoWays:
    """A parameter that FSDP2 gathers in one of two ways; each way keeps the tensors that torch made for it."""

    _KEPT = ("_unsharded_param", "_unsharded_inner_tensors", "all_gather_outputs")

    def __init__(self, parameter: Any) -> None:
        self._parameter, self._second = parameter, False
        #: what torch made for the way that is not in use
        self._made: dict[str, Any] = {}

    def _switch(self, second: bool) -> None:
        """Use the tensors of the other way, unless they are in use. The parameter has to be sharded."""
        if self._second == second:
            return
        self._second = second
        held = vars(self._parameter)
        made = {key: held.pop(key) for key in self._KEPT if key in held}
        self._parameter.all_gather_outputs = []
        self._parameter._init_extensions()
        held.update(self._made)
        self._made = made


class GatherExtension(_TwoWays):
    """Gathers a parameter by FSDP2's extensions, or as it is stored.

    A subclass has the extensions: ``before`` and ``after`` each all-gather.
    """

    before: Any
    after: Any

    def __init__(self, parameter: Any) -> None:
        super().__init__(parameter)
        #: this rank's parameter, which optimizers step
        self.shard: Tensor = parameter.sharded_param

    @classmethod
    def of(cls, model: nn.Module) -> list[Self]:
        """One for every parameter in a unit of ``model``."""
        return [cls(parameter) for parameter in _sharded_below(model)]

    @property
    def extended(self) -> bool:
        """Whether it is gathered by the extensions."""
        return self._second

    @property
    def local(self) -> Any:
        """This rank's shard; the very tensor that torch asks for extensions, of which ``to_local`` gives another."""
        return self._parameter._sharded_local_tensor

    def use(self, extended: bool) -> None:
        """Gather by the extensions from now on, or as stored."""
        local = self.local
        _unpatch([local], "fsdp_pre_all_gather", "fsdp_post_all_gather")
        if extended:
            local.fsdp_pre_all_gather, local.fsdp_post_all_gather = self.before, self.after
        self._switch(extended)


def shards(model: nn.Module) -> list[Tensor]:
    """What this rank holds of each parameter that FSDP2 or FSDP1 sharded."""
    flat: Any = (getattr(unit, "_flat_param", None) for unit in model.modules())
    pieces = [piece for one in flat if one is not None for piece in one._params]
    return pieces + [one.sharded_param for one in _sharded_below(model)]


class HalfGather(_TwoWays):
    """Gathers an fp32 parameter in a half ``dtype``, or as it is stored; its shard stays as it is.

    ``fully_shard`` itself has one dtype for all parameters of a unit. ``wrap(gathered)`` returns the whole parameter.
    """

    def __init__(self, parameter: Any, dtype: torch.dtype, wrap: Callable[[Tensor], Tensor]) -> None:
        super().__init__(parameter)
        self._dtype, self._wrap = dtype, wrap
        self.use(half=True)

    def use(self, *, half: bool) -> None:
        """Gather in the half dtype from now on, or as stored. The parameter has to be sharded."""
        self._switch(not half)
        parameter: Any = self._parameter
        _unpatch([parameter], "init_dtype_attrs", "init_unsharded_param")
        parameter.param_dtype = self._dtype if half else None
        if half:
            parameter.init_dtype_attrs, parameter.init_unsharded_param = self._init_dtypes, self._init_unsharded

    def _init_dtypes(self, policy: Any) -> None:  # called again by every unshard() of the user's
        type(self._parameter).init_dtype_attrs(self._parameter, policy)
        self._parameter.param_dtype = self._dtype

    def _init_unsharded(self) -> None:
        parameter: Any = self._parameter
        made = getattr(parameter, "_unsharded_param", None)
        type(parameter).init_unsharded_param(parameter)
        if made is not None:
            return
        whole = parameter._unsharded_param.detach()
        if isinstance(whole, DTensor):
            spec, local = parameter._unsharded_dtensor_spec, self._wrap(cast("Any", whole)._local_tensor)
            wrapped: Tensor = cast("Any", DTensor)(local, spec, requires_grad=False)
        else:
            wrapped = self._wrap(whole)
        parameter._unsharded_param = nn.Parameter(wrapped, requires_grad=parameter.sharded_param.requires_grad)


def gather_halves(
    model: nn.Module, names: Mapping[tuple[int, str], str], dtype: torch.dtype, wrap: Callable[..., Tensor]
) -> list[HalfGather]:
    """Gather the fp32 parameters in ``names`` in ``dtype``, all others as they are stored; shards stay as they are.

    Return what switches each of them between the two. ``names``: by the ``id`` of a module and a parameter's key in it.
    ``wrap(gathered, label=name)`` makes the whole parameter.
    """
    Units(model).reshard()
    halves = list[HalfGather]()
    for parameter in _sharded_below(model):
        info = parameter._module_info
        name = names.get((id(info.module), info.param_name))
        _unpatch([parameter], "init_dtype_attrs", "init_unsharded_param", "_unsharded_param")
        parameter.param_dtype, parameter.all_gather_outputs = None, []
        if name is not None and parameter.sharded_param.dtype == torch.float32:
            halves.append(HalfGather(parameter, dtype, partial(wrap, label=name)))
    return halves


class Units:
    """The shard units of a model."""

    def __init__(self, model: nn.Module) -> None:
        self._groups = _groups_below(model)

    def reshard(self) -> None:
        """Free every gathered parameter, so that the next forward pass gathers the weights as they are by then."""
        for group in self._groups:
            group.wait_for_unshard()  # of a gather that the user began
            group._to_sharded()


class UnusedParameters:
    """Leaves parameters that a step did not use on some rank (experts) the gradients that DDP would, under FSDP2.

    FSDP2 reduces what has a gradient on this rank: ranks that used different parameters add up different ones. Here a
    unit reduces all it has, with zeros for what the rank did not use; what no rank used has no gradient afterwards.
    A backward pass costs one all-reduce of a flag a parameter, read only where a gradient was missing on this rank.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._device, self._groups = device, _groups_below(model)
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        #: each parameter as torch records it, and its name
        self._names = {one: names.get(id(one.sharded_param), "") for one in _sharded_below(model)}
        #: of each group, the forwards that no backward pass has come to yet: each may end in a reduction
        self._left = dict.fromkeys(self._groups, 0)
        self._forget()
        for group in self._groups:
            self._watch(group, group.pre_forward, group.post_backward)

    def _forget(self) -> None:
        #: what had a gradient on this rank, what had none since the last step either, what a unit has that did not run
        self._used, self._missed, self._skipped = set[Any](), set[Any](), set[Any]()
        self._reduced = False

    def _watch(self, group: Any, forward: Callable[..., Any], reduce: Callable[..., None]) -> None:
        def pre_forward(*given: Any) -> Any:
            self._left[group] += torch.is_grad_enabled() and not in_backward()
            return forward(*given)

        def post_backward(*hook: Any) -> None:
            self._left[group] -= 1
            if group.reduce_grads:
                self._complete(group, last=self._left[group] <= 0)
            reduce(*hook)

        group.pre_forward, group.post_backward = pre_forward, post_backward

    def release(self) -> None:
        """Let go of the units."""
        _unpatch(self._groups, "pre_forward", "post_backward")

    def _complete(self, group: Any, *, last: bool) -> None:
        """Put zeros where this rank has no gradient, before the unit's are reduced."""
        self._reduced = True
        members = {parameter for parameter in group.fsdp_params if parameter.sharded_param.requires_grad}
        missing = {parameter for parameter in members if not _has_gradient(parameter)}
        self._used |= members - missing
        if missing == members:
            if not last:  # of a unit that ran twice, all gradients come with the first forward
                return
            if group._training_state.name != "PRE_BACKWARD":  # the pass did not come to the unit's output
                self._skipped |= members
                return
        for parameter in missing:
            if parameter.sharded_param.grad is None:
                self._missed.add(parameter)
            parameter.unsharded_param.grad = torch.zeros_like(parameter.unsharded_param)

    def finish_backward(self) -> None:
        """After a backward pass: take the gradient away from parameters that no rank used in the window.

        A unit that another rank ran and this one did not, whose weights were then mistaken for others, is a PlanError.
        """
        self._left = dict.fromkeys(self._groups, 0)
        if not self._reduced:
            return
        flags = torch.tensor([parameter in self._used for parameter in self._names], dtype=torch.uint8)
        # From pinned memory, so that nothing waits for the device.
        there = (flags.pin_memory() if self._device.type == "cuda" else flags).to(self._device, non_blocking=True)
        dist.all_reduce(there, op=dist.ReduceOp.MAX)
        absent = self._skipped - self._used
        if self._missed or absent:
            for (parameter, name), used in zip(self._names.items(), there.tolist(), strict=True):
                if used and parameter in absent:
                    raise ranks_apart(f"the unit of {name!r}, which ran on some ranks only")
                if not used and parameter in self._missed:
                    parameter.sharded_param.grad = None
        self._forget()


def _has_gradient(parameter: Any) -> bool:
    """Whether there is a gradient of the parameter that is not reduced yet."""
    unsharded = getattr(parameter, "_unsharded_param", None)  # none before it was gathered for the first time
    return getattr(unsharded, "grad", None) is not None or parameter.unsharded_accumulated_grad is not None


def ranks_apart(given: str) -> PlanError:
    """The error where ranks run different modules."""
    return PlanError.of(
        f"{given}, with sharded weights, which all ranks gather and sum together",
        "run every one on every rank, with 0 times what one does not need in its loss, or use strategy='mp_ddp'",
    )


def sync_hooks_and_requires_grad(model: nn.Module) -> Callable[[], None]:
    """Give gathered parameters the hooks and ``requires_grad`` of their shards; what is returned ends that.

    The hooks then see the whole gradient of this rank before it is summed, as under DDP. torch itself copies
    ``requires_grad`` only where it gathers: of two that differ later the one that was changed since counts, be it the
    shard (``toggle_optimizer``) or what is gathered (by hand).
    """
    groups, trained = _groups_below(model), dict[Any, bool]()

    def sync(group: Any) -> None:
        for parameter in group.fsdp_params if group.is_unsharded else ():
            sharded, unsharded = parameter.sharded_param, parameter._unsharded_param
            hooks = sharded._backward_hooks
            if hooks and unsharded._backward_hooks is not hooks:
                hooks.update(unsharded._backward_hooks or {})
                unsharded._backward_hooks = hooks
            if sharded.requires_grad != unsharded.requires_grad:
                changed = not trained.get(parameter, unsharded.requires_grad)
                sharded.requires_grad_(changed)
                unsharded.requires_grad_(changed)
            trained[parameter] = sharded.requires_grad

    def patch(group: Any, wait: Callable[[], None], to_sharded: Callable[[], None]) -> None:
        group.wait_for_unshard = lambda: (wait(), sync(group))
        group._to_sharded = lambda: (sync(group), to_sharded())

    for group in groups:
        patch(group, group.wait_for_unshard, group._to_sharded)
    return partial(_unpatch, groups, "wait_for_unshard", "_to_sharded")


@contextmanager
def hooks_kept(module: nn.Module) -> Generator[None, None, None]:
    """Within, parameters may be put in place of others: they take over hooks that a user registered."""
    before: dict[str, Any] = dict(module.named_parameters(remove_duplicate=False))
    yield
    new: Any
    for name, new in module.named_parameters(remove_duplicate=False):
        if new is not before[name]:
            new._backward_hooks = before[name]._backward_hooks
            new._post_accumulate_grad_hooks = before[name]._post_accumulate_grad_hooks


@contextmanager
def unsummed_gradients(model: nn.Module) -> Generator[None, None, None]:
    """Within, backward passes of a model's units do not sum over ranks; what they leave is dropped."""
    for unit in _units(model):
        unit.set_requires_gradient_sync(False, recurse=False)
    try:
        yield
    finally:
        reset_units(model)


def reset_units(model: nn.Module) -> None:
    """Bring the units of ``model`` to where a step begins: what fails within one leaves them in the midst of it."""
    for unit in _units(model):
        unit.set_requires_gradient_sync(True, recurse=False)  # over shards and over replicas
        reset = getattr(unit, "reset_iter_state", None)  # torch 2.11 has none
        if reset is not None and _state(unit)._is_root:
            reset()
    for parameter in _sharded_below(model):
        parameter.unsharded_accumulated_grad = None
        if hasattr(parameter, "_unsharded_param"):
            parameter._unsharded_param.grad = None


def make_root(unit: Any) -> None:
    """Make it the root now: a unit that is called before the first step must not become one."""
    _state(unit)._lazy_init()


def before_backward_from(loss: Tensor, unit: Any) -> None:
    """Have the unit gathered when a backward pass comes to ``loss``."""
    loss.register_hook(_state(unit)._pre_backward)


def _units(model: nn.Module) -> list[FSDPModule]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def _groups_below(model: nn.Module) -> list[Any]:
    return [group for unit in _units(model) for group in _groups_of(unit)]


def _sharded_below(model: nn.Module) -> list[Any]:
    return [parameter for group in _groups_below(model) for parameter in group.fsdp_params]


def _groups_of(unit: Any) -> list[Any]:
    """The unit's groups of parameters, each of which is gathered and reduced as one."""
    state = _state(unit)
    several = getattr(state, "_fsdp_param_groups", None)  # torch 2.11 has one, under the other name
    return [group for group in several or [state._fsdp_param_group] if group is not None]


#: what torch knows of a unit
_state = methodcaller("_get_fsdp_state")


def _unpatch(objects: Iterable[Any], *names: str) -> None:
    for one in objects:
        for name in names:
            vars(one).pop(name, None)


# ------------------------------------------------------------------ FSDP1

#: the attribute of a module in which its wrapper is kept
FSDP1_ROOT = "_lmp_fsdp1_root"
#: the keyword of FSDP1's ``MixedPrecision`` by which it wraps no module (batch norms, else) apart
LEAVE_ALL_MODULES: dict[str, Any] = {"_module_classes_to_ignore": ()}


def total_norms_by(norm: Callable[..., Tensor]) -> AbstractContextManager[None]:
    """Within, ``clip_grad_norm_`` calls ``norm(torch's own, gradients, norm_type, ...)``."""
    place: Any = import_module("torch.nn.utils.clip_grad")
    return patched(place, _get_total_norm=partial(norm, place._get_total_norm))
