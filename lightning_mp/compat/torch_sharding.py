"""torch's private names around sharding (DDP, FSDP2, FSDP1), each behind a function that says what it is for."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lightning_mp.compat.torch import in_backward

# ------------------------------------------------------------------ DDP


def register_comm_hooks(model: Any) -> bool:
    """Give DDP's reducer, which is new, the communication hooks that the last one had; whether there are any."""
    for hook, state in model._comm_hooks:
        cast("Any", dist)._register_comm_hook(model.reducer, state, hook)
    return bool(model._comm_hooks)


# ------------------------------------------------------------------ FSDP2


def fsdp2_policy(unit: Any) -> Any:
    """The ``MixedPrecisionPolicy`` that the unit was given."""
    return _fsdp2_state(unit)._mp_policy


def fsdp2_groups(unit: Any) -> list[Any]:
    """The unit's groups of parameters, each of which is gathered and reduced as one."""
    state = _fsdp2_state(unit)
    several = getattr(state, "_fsdp_param_groups", None)  # torch 2.11 has one, under the other name
    return [group for group in several or [state._fsdp_param_group] if group is not None]


def groups_below(model: nn.Module) -> list[Any]:
    """Those of every unit of ``model``."""
    return [group for unit in _units(model) for group in fsdp2_groups(unit)]


def fsdp2_parameters(unit: Any) -> Iterator[Any]:
    """The unit's parameters as torch records them."""
    for group in fsdp2_groups(unit):
        yield from group.fsdp_params


def members_of(group: Any) -> list[Any]:
    """The same of one group."""
    return group.fsdp_params


def shard_of(parameter: Any) -> Any:
    """This rank's parameter, which optimizers step, of one that torch records."""
    return parameter.sharded_param


class GatherWays:
    """More than one way in which FSDP2 gathers ``parameter``; each keeps what torch made for it, gradients included."""

    _KEPT = ("_unsharded_param", "_unsharded_inner_tensors", "all_gather_outputs")

    def __init__(self, parameter: Any) -> None:
        self._parameter, self._name = parameter, "stored"
        self._made: dict[str, dict[str, Any]] = {}

    def local(self) -> Tensor:
        """This rank's shard; the very tensor that torch asks for extensions, of which ``to_local`` gives another."""
        return self._parameter._sharded_local_tensor

    def take(self, name: str, extension: tuple[Callable[..., Any], Callable[..., Any]] | None) -> None:
        """Gather the way called ``name`` from now on, by what is to be done before and after; the shards are sharded.

        ``fsdp_pre_all_gather`` and ``fsdp_post_all_gather`` of ``torch.distributed.fsdp``'s tensor extensions; another
        shard than that of the last call has none yet.
        """
        local: Any = self.local()
        if extension is None:
            for key in ("fsdp_pre_all_gather", "fsdp_post_all_gather"):
                vars(local).pop(key, None)
        else:
            local.fsdp_pre_all_gather, local.fsdp_post_all_gather = extension
        if name == self._name:
            return
        held = vars(self._parameter)
        self._made[self._name] = {key: held.pop(key) for key in self._KEPT if key in held}
        self._parameter.all_gather_outputs = []
        self._parameter._init_extensions()
        held.update(self._made.pop(name, {}))
        self._name = name


def places_of(parameter: Any) -> list[tuple[nn.Module, str]]:
    """The modules that hold the parameter, and under which names."""
    info = parameter._module_info
    places = [(info.module, info.param_name)]
    return places + list(zip(info.shared_modules, info.shared_param_names, strict=True))


def gather_as(parameter: Any, dtype: torch.dtype, wrap: Callable[[Tensor], Tensor]) -> None:
    """Gather the parameter in ``dtype``; the whole one is ``wrap`` of what was gathered. Shards stay as stored.

    The unit has to be sharded. ``fully_shard`` itself knows one dtype for all that a unit has.
    """
    cls = type(parameter)

    def init_dtype_attrs(policy: Any) -> None:  # called again by every unshard() of the user's
        cls.init_dtype_attrs(parameter, policy)
        parameter.param_dtype = dtype

    def init_unsharded_param() -> None:
        made = getattr(parameter, "_unsharded_param", None)
        cls.init_unsharded_param(parameter)
        if made is None:
            whole = parameter._unsharded_param.detach()
            if isinstance(whole, DTensor):
                spec, local = parameter._unsharded_dtensor_spec, wrap(cast("Any", whole)._local_tensor)
                wrapped: Tensor = cast("Any", DTensor)(local, spec, requires_grad=False)
            else:
                wrapped = wrap(whole)
            parameter._unsharded_param = nn.Parameter(wrapped, requires_grad=parameter.sharded_param.requires_grad)

    gather_as_stored(parameter)
    vars(parameter).update(
        param_dtype=dtype, init_dtype_attrs=init_dtype_attrs, init_unsharded_param=init_unsharded_param
    )


def gather_as_stored(parameter: Any) -> None:
    """Undo ``gather_as``; what was made for an earlier gather is dropped."""
    for name in ("init_dtype_attrs", "init_unsharded_param", "_unsharded_param"):
        vars(parameter).pop(name, None)
    parameter.param_dtype, parameter.all_gather_outputs = None, []


def shard_again(group: Any) -> None:
    """Let go of what is gathered, whatever the group is at."""
    group._to_sharded()


def has_unsharded_gradient(parameter: Any) -> bool:
    """Whether backward passes left a gradient of the parameter that is not reduced yet."""
    unsharded = getattr(parameter, "_unsharded_param", None)  # none before it was gathered for the first time
    there = unsharded is not None and unsharded.grad is not None
    return there or parameter.unsharded_accumulated_grad is not None


def zero_unsharded_gradient(parameter: Any) -> None:
    """Have zeros reduced for a parameter that has no gradient on this rank."""
    parameter.unsharded_param.grad = torch.zeros_like(parameter.unsharded_param)


def in_backward_pass(group: Any) -> bool:
    """Whether the backward pass under way came to the output of the group's unit."""
    return group._training_state.name == "PRE_BACKWARD"


def holds_sums_of_shards(group: Any) -> bool:
    """Whether gradients of earlier micro-batches wait to be summed over replicas (HSDP)."""
    return group._partial_reduce_output is not None


def sum_over_replicas(model: nn.Module, *, now: bool) -> None:
    """Whether backward passes sum over HSDP's replicas what they summed over shards, or keep it for a later one."""
    for unit in _units(model):
        unit.set_requires_all_reduce(now, recurse=False)


def drop_sums_of_shards(model: nn.Module) -> None:
    """Forget what waits to be summed over replicas."""
    for group in groups_below(model):
        group._partial_reduce_output = None


class Uses:
    """Counts the forwards of a group's unit, each of which a backward pass may end in a reduction, until ``release``.

    ``call`` comes before each reduction, told whether the unit's forwards have all been passed by then.
    """

    def __init__(self, group: Any, call: Callable[[bool], None]) -> None:
        self._group, self._left = group, 0
        forward, reduce = group.pre_forward, group.post_backward

        def pre_forward(*given: Any) -> Any:
            self._left += torch.is_grad_enabled() and not in_backward()
            return forward(*given)

        def post_backward(*hook: Any) -> None:
            self._left -= 1
            if group.reduce_grads:
                call(self._left <= 0)
            reduce(*hook)

        group.pre_forward, group.post_backward = pre_forward, post_backward

    def ends_window(self) -> bool:
        """Whether this pass summed gradients over all ranks, replicas of shards included."""
        return self._group.all_reduce_grads

    def reset(self) -> None:
        """A backward pass is over."""
        self._left = 0

    def release(self) -> None:
        """Let go of the group."""
        for name in ("pre_forward", "post_backward"):
            vars(self._group).pop(name, None)


def keep_alike(group: Any) -> Callable[[], None]:
    """Give gathered parameters the hooks and ``requires_grad`` of their shards; what is returned ends that.

    The hooks then see what they see under DDP, the whole gradient of this rank before it is summed. torch itself copies
    ``requires_grad`` where it gathers, and not again while a parameter stays gathered: of two that differ by then the
    one that was changed since counts, be it the shard (``toggle_optimizer``) or what is gathered (by hand).
    """
    wait, to_sharded = group.wait_for_unshard, group._to_sharded
    trained: dict[int, bool] = {}

    def sync() -> None:
        for parameter in group.fsdp_params if group.is_unsharded else ():
            sharded, unsharded = parameter.sharded_param, parameter._unsharded_param
            hooks = sharded._backward_hooks
            if hooks and unsharded._backward_hooks is not hooks:
                hooks.update(unsharded._backward_hooks or {})
                unsharded._backward_hooks = hooks
            if sharded.requires_grad != unsharded.requires_grad:
                changed = not trained.get(id(parameter), unsharded.requires_grad)
                sharded.requires_grad_(changed)
                unsharded.requires_grad_(changed)
            trained[id(parameter)] = sharded.requires_grad

    def wait_for_unshard() -> None:
        wait()
        sync()

    def _to_sharded() -> None:
        sync()
        to_sharded()

    group.wait_for_unshard, group._to_sharded = wait_for_unshard, _to_sharded

    def undo() -> None:
        for name in ("wait_for_unshard", "_to_sharded"):
            vars(group).pop(name, None)

    return undo


@contextmanager
def hooks_kept(module: nn.Module) -> Generator[None, None, None]:
    """Within, parameters may be put in place of others: they take over hooks that a user registered."""
    before: dict[str, Any] = dict(module.named_parameters(remove_duplicate=False))
    yield
    after: dict[str, Any] = dict(module.named_parameters(remove_duplicate=False))
    for name, old in before.items():
        if after[name] is not old:
            after[name]._backward_hooks = old._backward_hooks
            after[name]._post_accumulate_grad_hooks = old._post_accumulate_grad_hooks


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
    """Bring the units of ``model`` to where a step begins: what fails within one leaves them in the midst of it.

    Gradients would stay unsummed until they are set back to it, and a backward pass that did not end seem under way.
    """
    for unit in _units(model):
        unit.set_requires_gradient_sync(True, recurse=False)  # over shards and over replicas
        for parameter in fsdp2_parameters(unit):
            parameter.unsharded_accumulated_grad = None
            if hasattr(parameter, "_unsharded_param"):
                parameter._unsharded_param.grad = None
        reset = getattr(unit, "reset_iter_state", None)  # torch 2.11 has none
        if reset is not None and _fsdp2_state(unit)._is_root:
            reset()
    drop_sums_of_shards(model)


def _units(model: nn.Module) -> list[FSDPModule]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def make_root(unit: Any) -> None:
    """Make it the root now: a unit that is called before the first step must not become one."""
    _fsdp2_state(unit)._lazy_init()


def before_backward_from(loss: Tensor, unit: Any) -> None:
    """Have the unit gathered when a backward pass comes to ``loss``."""
    loss.register_hook(_fsdp2_state(unit)._pre_backward)


def _fsdp2_state(unit: Any) -> Any:
    return unit._get_fsdp_state()


# ------------------------------------------------------------------ FSDP1


def flat_members(unit: Any) -> Iterator[tuple[Tensor, torch.Size]]:
    """Each parameter in the unit's flat parameter, and its shape when whole."""
    flat = unit._flat_param
    if flat is not None:
        yield from zip(flat._params, flat._shapes, strict=True)


def leave_all_modules() -> dict[str, Any]:
    """The keyword of FSDP1's ``MixedPrecision`` by which it wraps no module (batch norms, else) apart."""
    return {"_module_classes_to_ignore": ()}


def take_total_norms_by(norm: Callable[..., Tensor]) -> Callable[[], None]:
    """Have ``clip_grad_norm_`` call ``norm(torch's own, gradients, norm_type, ...)``; what is returned ends that."""
    place: Any = import_module("torch.nn.utils.clip_grad")
    own = place._get_total_norm
    place._get_total_norm = partial(norm, own)

    def undo() -> None:
        place._get_total_norm = own

    return undo
