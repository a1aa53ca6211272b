"""Functions around torch's private names of sharding: DDP, FSDP2 and FSDP1."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from datetime import timedelta
from functools import partial
from importlib import import_module
from inspect import getattr_static
from operator import methodcaller
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor, distribute_tensor

from lightning_mp.compat import patched
from lightning_mp.compat.torch import in_backward, is_compiled, is_tracing
from lightning_mp.errors import PlanError

if TYPE_CHECKING:
    from typing_extensions import Self

# ------------------------------------------------------------------ process groups


def set_timeout(groups: Iterable[dist.ProcessGroup], timeout: timedelta | None) -> None:
    """Have collectives of ``groups`` wait at most ``timeout`` for other ranks.

    A device mesh and DeepSpeed make groups with torch's default. ``None`` leaves it.
    """
    if timeout is not None:
        for group in groups:
            cast("Any", dist).distributed_c10d._set_pg_timeout(timeout, group)


# ------------------------------------------------------------------ DDP


def ddp_buffers_outside_autocast(ddp: Any, device_type: str) -> AbstractContextManager[None]:
    """Return a context in which ``ddp`` broadcasts buffers with autocast off.

    Lightning enters autocast around DDP's forward, where DDP puts buffers into one flat tensor.
    Autocast knows one half format, and raises at a buffer in the other one.
    """
    sync = ddp._sync_buffers

    def sync_buffers() -> None:
        with torch.autocast(device_type, enabled=False):
            sync()

    return patched(ddp, _sync_buffers=sync_buffers)


def register_comm_hooks(model: Any) -> bool:
    """Give DDP's new reducer the communication hooks of the one before. True if there are any."""
    for hook, state in model._comm_hooks:
        cast("Any", dist)._register_comm_hook(model.reducer, state, hook)
    return bool(model._comm_hooks)


# ------------------------------------------------------------------ FSDP2


def policies(model: nn.Module) -> Iterator[tuple[str, Any, torch.dtype]]:
    """Yield each unit's name, its ``MixedPrecisionPolicy``, and its trainable parameters' dtype.

    Units without trainable parameters are left out.
    """
    for name, unit in model.named_modules():
        if isinstance(unit, FSDPModule):
            held = (one.sharded_param for group in _groups_of(unit) for one in group.fsdp_params)
            stored = next((parameter.dtype for parameter in held if parameter.requires_grad), None)
            if stored is not None:
                yield name, _state(unit)._mp_policy, stored


class _TwoWays:
    """A parameter that FSDP2 gathers in one of two ways.

    Each way keeps the tensors that torch made for it.
    """

    _KEPT = ("_unsharded_param", "_unsharded_inner_tensors", "all_gather_outputs")

    def __init__(self, parameter: Any) -> None:
        self._parameter, self._second = parameter, False
        #: torch's tensors for the way that is not in use
        self._made: dict[str, Any] = {}

    def _switch(self, second: bool) -> None:
        """Use the tensors of the second way, or of the first.

        The parameter has to be sharded at the moment.
        """
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
    """A parameter that is gathered through FSDP2's extension hooks, or as it is stored.

    A subclass has the hooks: ``before`` and ``after`` each all-gather.
    """

    before: Any
    after: Any

    def __init__(self, parameter: Any) -> None:
        super().__init__(parameter)
        #: this rank's parameter, which optimizers step
        self.shard: Tensor = parameter.sharded_param

    @classmethod
    def of(cls, model: nn.Module) -> list[Self]:
        """Return an object for each parameter in FSDP2's units of ``model``."""
        return [cls(parameter) for parameter in _sharded_below(model)]

    @property
    def extended(self) -> bool:
        """True if the parameter is gathered through the hooks."""
        return self._second

    @property
    def local(self) -> Any:
        """Return the tensor of this rank's shard on which torch looks for the hooks.

        ``to_local`` would return another object.
        """
        return self._parameter._sharded_local_tensor

    def use(self, extended: bool) -> None:
        """Gather through the hooks from now on if ``extended``, else as stored.

        The parameter has to be sharded.
        """
        local = self.local
        _unpatch([local], "fsdp_pre_all_gather", "fsdp_post_all_gather")
        if extended:
            local.fsdp_pre_all_gather, local.fsdp_post_all_gather = self.before, self.after
        self._switch(extended)


def shards(model: nn.Module) -> list[Tensor]:
    """Return this rank's shard of each parameter that FSDP2 or FSDP1 sharded."""
    flat: Any = (getattr(unit, "_flat_param", None) for unit in model.modules())
    pieces = [piece for one in flat if one is not None for piece in one._params]
    return pieces + [one.sharded_param for one in _sharded_below(model)]


class HalfGather(_TwoWays):
    """An fp32 parameter that is gathered in a half ``dtype``, or as it is stored.

    Its shard stays fp32. ``fully_shard`` itself has one dtype for all parameters of a unit.
    ``wrap`` takes the gathered tensor, and returns the tensor that the module sees.
    """

    def __init__(self, parameter: Any, dtype: torch.dtype, wrap: Callable[[Tensor], Tensor]) -> None:
        super().__init__(parameter)
        self._dtype, self._wrap = dtype, wrap
        self.use(half=True)

    def use(self, *, half: bool) -> None:
        """Gather in the half dtype from now on if ``half``, else as stored.

        The parameter has to be sharded.
        """
        self._switch(not half)
        parameter: Any = self._parameter
        _unpatch([parameter], "init_dtype_attrs", "init_unsharded_param")
        parameter.param_dtype = self._dtype if half else None
        if half:
            parameter.init_dtype_attrs, parameter.init_unsharded_param = self._init_dtypes, self._init_unsharded

    def _init_dtypes(self, policy: Any) -> None:  # a user's unshard() calls it again
        type(self._parameter).init_dtype_attrs(self._parameter, policy)
        self._parameter.param_dtype = self._dtype

    def _init_unsharded(self) -> None:
        """Create the gathered parameter as torch does, then wrap it at its first gather."""
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
    """Gather the fp32 parameters in ``names`` in ``dtype``, and all others as they are stored.

    All weights are resharded, and shards keep their values and dtypes. The result has a switch for
    each parameter that is gathered in half.

    Args:
        model: the model with FSDP2's units.
        names: names of parameters, by the ``id`` of a module and the parameter's key in it.
        dtype: the half dtype.
        wrap: ``wrap(gathered, label=name)`` returns the tensor that the module sees.
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
    """FSDP2's shard units of a model."""

    def __init__(self, model: nn.Module) -> None:
        self._groups = _groups_below(model)

    def reshard(self) -> None:
        """Reshard every parameter, so that the next forward pass gathers the shards' values.

        Nothing is resharded in a backward pass with ``create_graph=True`` under ``Writes``.
        """
        for group in self._groups:
            group.wait_for_unshard()  # the user may have begun a gather
            group._to_sharded()


class Writes:
    """Patches of FSDP2 by which users write to sharded weights as to plain weights.

    They hold until ``release``. ``weight.data = value`` changes nothing in a DTensor of torch.
    Under the patches the values go into the shard. A write to a gathered weight goes into the shard
    at the next reshard. There are three exceptions. A weight that is gathered in half or FP8 is not
    written back. A shard that changed after the gather keeps its value. Outside of the root unit,
    an in-place write to the ``.data`` of a gathered weight is lost, because it leaves no trace.

    Raises:
        PlanError: from an assignment or a reshard, if a shard cannot take the values. From the next
            unshard, if a parameter was replaced or removed.
    """

    def __init__(self, model: nn.Module) -> None:
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        #: torch's FSDP parameter, by the ``id`` of the DTensor that users see as the weight
        self._dtensors = {id(one.sharded_param): one for one in _sharded_below(model)}
        #: for each gathered parameter, the versions of the weight and of its shard at the gather
        self._versions: dict[Any, tuple[int, int]] = {}
        #: parameters that a user assigned to since they were gathered
        self._assigned = set[Any]()
        self._groups = _groups_below(model)
        root: list[Any] = _groups_of(model) if isinstance(model, FSDPModule) else []
        for group in self._groups:
            self._watch(group, group.unshard, group._to_unsharded, group._to_sharded, root=group in root)
        self._patch = ExitStack()
        plain: Any = DTensor.data
        before: Any = vars(DTensor).get("data", plain)
        data = property(plain.__get__, partial(self._assign, before.__set__))
        self._patch.enter_context(patched(DTensor, data=data))

    def release(self) -> None:
        """Undo the patches of the units and of ``DTensor``."""
        _unpatch(self._groups, "unshard", "_to_unsharded", "_to_sharded")
        self._patch.close()

    def _watch(
        self,
        group: Any,
        unshard: Callable[..., None],
        to_unsharded: Callable[[], None],
        to_sharded: Callable[[], None],
        *,
        root: bool,
    ) -> None:
        def check_and_unshard(async_op: bool = False) -> None:
            if group.is_sharded:
                for parameter in group.fsdp_params:
                    self._refuse_replaced(parameter)
            unshard(async_op)

        def to_unsharded_and_note() -> None:
            to_unsharded()
            for parameter in group.fsdp_params:
                self._note_gathered(parameter)

        def take_and_to_sharded() -> None:
            # create_graph=True: the backward pass of the gradients reads the gathered weights again
            if in_backward() and torch.is_grad_enabled():
                return
            if group.is_unsharded:
                self._take_written(group, every=root)
            to_sharded()

        group.unshard = check_and_unshard
        group._to_unsharded = to_unsharded_and_note
        group._to_sharded = take_and_to_sharded

    def _note_gathered(self, parameter: Any) -> None:
        whole, shard = parameter._unsharded_param, parameter.sharded_param
        self._versions[parameter] = whole._version, shard._version
        self._assigned.discard(parameter)
        self._names[id(whole)] = self._names.get(id(shard), "")
        if isinstance(whole, DTensor):  # tensor parallelism
            self._dtensors[id(whole)] = parameter

    def _assign(self, assign: Callable[[Tensor, Tensor], None], weight: Any, value: Tensor) -> None:
        """Write ``value`` into the shard of ``weight``.

        For a DTensor of no unit, call torch's ``assign``.

        Raises:
            PlanError: dtype or shape differ, the value shares memory with another weight, or a
                gathered tensor-parallel weight is assigned to.
        """
        parameter = self._dtensors.get(id(weight))
        if parameter is None:
            assign(weight, value)
            return
        if weight is not parameter.sharded_param:
            raise self._refused(weight, "a value in a step, with tensor parallelism", "with weight.data.copy_(value)")
        self._check(weight, value)
        local, piece = weight._local_tensor, _local_of(_sharded_like(weight, value.detach()))
        if _share_memory(local, piece):
            piece = piece.clone()  # a view of the weight may have its entries in another order
        elif any(_share_memory(shard, piece) for shard in self._shards()):
            given = "the data of another weight, which two shards cannot share"
            raise self._refused(weight, given, "value.clone()")
        with torch.no_grad():
            local.copy_(piece)
        self._assigned.add(parameter)

    def _shards(self) -> Iterator[Tensor]:
        return (parameter._sharded_local_tensor for parameter in self._dtensors.values())

    def _check(self, weight: Tensor, value: Tensor) -> None:
        """Raise PlanError if ``value`` has another dtype or shape than ``weight``."""
        if value.dtype != weight.dtype:
            given = f"a tensor in {value.dtype} for a weight in {weight.dtype}"
            raise self._refused(weight, given, "value.to(weight.dtype)")
        if value.shape != weight.shape:
            given = f"a tensor of shape {tuple(value.shape)} for a weight of {tuple(weight.shape)}"
            raise self._refused(weight, given, "one value an entry, and change shapes before the run")

    def _refused(self, weight: Tensor, given: str, instead: str) -> PlanError:
        name = self._names[id(weight)]
        return PlanError.of(f"{name}.data = {given}, with sharded weights", f"assign {instead}")

    def _refuse_replaced(self, parameter: Any) -> None:
        """Raise PlanError if the parameter's module no longer holds its shard."""
        info = parameter._module_info
        if info.module._parameters.get(info.param_name) is not parameter.sharded_param:
            name = self._names.get(id(parameter.sharded_param), info.param_name)
            raise PlanError.of(
                f"the parameter {name!r} replaced or removed in the run, with sharded weights",
                "write to the parameter that is there, with weight.data.copy_(value), or change it before the run",
            )

    def _take_written(self, group: Any, *, every: bool) -> None:
        """Write gathered weights that a user changed into the shards, or all of them if ``every``.

        The root unit passes ``every``, because an in-place operation on ``weight.data`` leaves no
        trace.

        Raises:
            PlanError: a user assigned data of another dtype or shape.
        """
        shards, pieces = list[Tensor](), list[Tensor]()
        for parameter in group.fsdp_params:
            versions = self._versions.pop(parameter, None)
            if versions is None or parameter in self._assigned or not _is_gathered_as_stored(parameter):
                continue
            whole, gathered = parameter._unsharded_param, parameter.all_gather_outputs[0]
            whole_version, shard_version = versions
            if parameter.sharded_param._version != shard_version:  # the shard is newer
                continue
            replaced = whole.numel() > 0 and not _share_memory(_local_of(whole), gathered)
            changed = replaced or whole._version != whole_version
            if replaced:
                self._check(parameter.sharded_param, whole)
            if changed or every:
                shards.append(_local_of(parameter.sharded_param))
                pieces.append(_piece_of(parameter, _local_of(whole)))
            if replaced:
                whole.data = gathered.as_strided(whole.shape, parameter._contiguous_orig_stride)
            if changed and group._reshard_after_forward_event is None:
                # the next gather runs on its own stream, and has to wait for this write
                group._reshard_after_forward_event = group.device_handle.Event()
        if shards:
            with torch.no_grad():
                cast("Any", torch)._foreach_copy_(shards, pieces)
        if group._reshard_after_forward_event is not None:
            group._reshard_after_forward_event.record()


class ShardGradients:
    """Patches by which ``grad`` of a gathered weight is the gradient of its shard.

    They hold until ``release``. In a step ``module.parameters()`` are gathered weights, and FSDP2
    keeps gradients on the shards. Without the patches, ``module.zero_grad()`` would clear nothing
    in a step, and gradients would add up. Reading returns torch's own gradient of the gathered
    weight if it has one. In a backward pass ``grad`` is torch's own, because FSDP2 reduces it.
    """

    def __init__(self, model: nn.Module) -> None:
        #: torch's FSDP parameter, by the ``id`` of the gathered weight
        self._parameters: dict[int, Any] = {}
        self._classes = set[type]()
        self._patches = ExitStack()
        self._groups = _groups_below(model)
        for group in self._groups:
            self._watch(group, group._to_unsharded)

    def release(self) -> None:
        """Undo the patches of the units and of torch's classes."""
        _unpatch(self._groups, "_to_unsharded")
        self._patches.close()

    def _watch(self, group: Any, to_unsharded: Callable[[], None]) -> None:
        def to_unsharded_and_note() -> None:
            to_unsharded()
            for parameter in group.fsdp_params:
                self._parameters[id(parameter._unsharded_param)] = parameter
                self._patch_class(type(parameter._unsharded_param))

        group._to_unsharded = to_unsharded_and_note

    def _patch_class(self, weight_class: type) -> None:
        """Patch ``grad`` of ``weight_class`` once: ``nn.Parameter``, or a class of half weights."""
        if weight_class in self._classes:
            return
        self._classes.add(weight_class)
        own: Any = getattr_static(weight_class, "grad")

        def read(weight: Tensor) -> Tensor | None:
            gradient: Tensor | None = own.__get__(weight)
            # torch.compile can only trace plain tensors here
            shard = None if gradient is not None or is_tracing() else self._shard_of(weight)
            return gradient if shard is None else shard.grad

        def write(weight: Tensor, value: Tensor | None) -> None:
            shard = self._shard_of(weight)
            if shard is None:
                own.__set__(weight, value)
                return
            own.__set__(weight, None)
            shard.grad = None if value is None else _sharded_like(shard, value)

        def delete(weight: Tensor) -> None:
            write(weight, None)

        self._patches.enter_context(patched(weight_class, grad=property(read, write, delete)))

    def _shard_of(self, weight: Tensor) -> Any:
        """Return the shard of a gathered weight, or None for other tensors and in a backward pass."""
        parameter = self._parameters.get(id(weight))
        if parameter is None or vars(parameter).get("_unsharded_param") is not weight or in_backward():
            return None
        return parameter.sharded_param


def _sharded_like(weight: Any, value: Any) -> Tensor:
    """Return ``value`` sharded like ``weight``. The value may be whole, or sharded in any way.

    A collective if the value is a DTensor of other placements.
    """
    if not isinstance(value, DTensor):
        return distribute_tensor(value, weight.device_mesh, weight.placements, src_data_rank=None)
    if value.placements == weight.placements:
        return value
    return cast("Any", value).redistribute(weight.device_mesh, weight.placements)


def _is_gathered_as_stored(parameter: Any) -> bool:
    return parameter.param_dtype is None and not hasattr(parameter._sharded_local_tensor, "fsdp_pre_all_gather")


def _local_of(tensor: Tensor) -> Tensor:
    return cast("Any", tensor)._local_tensor if isinstance(tensor, DTensor) else tensor.detach()


def _piece_of(parameter: Any, whole: Tensor) -> Tensor:
    """Return this rank's piece of the whole parameter, as FSDP2 cuts it."""
    mesh, dimension = parameter.mesh_info, parameter.fsdp_placement.dim
    pieces = whole.chunk(mesh.shard_mesh_size, dimension)
    return (
        pieces[mesh.shard_mesh_rank] if mesh.shard_mesh_rank < len(pieces) else whole.new_empty(parameter.sharded_size)
    )


def _share_memory(one: Tensor, other: Tensor) -> bool:
    """Return True if both tensors are on one storage that has memory, or would have it (a fake tensor)."""
    first: Any = one.untyped_storage()
    second: Any = other.untyped_storage()
    if first.data_ptr() != 0:
        return first.data_ptr() == second.data_ptr()
    return first.nbytes() > 0 and first._cdata == second._cdata


class UnusedParameters:
    """Patches of FSDP2 that give the gradient of DDP to parameters that some ranks did not use.

    Experts are an example. FSDP2 reduces only parameters with a gradient on this rank, so ranks
    that used different parameters would add up different ones. Under the patches a unit reduces all
    its trainable parameters, with zeros for unused ones. A parameter that no rank used in the
    window has no gradient afterwards. A backward pass costs one all-reduce of a flag for each
    parameter. The host reads the flags only if a gradient was missing on this rank.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._device, self._groups = device, _groups_below(model)
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        #: the name of each of torch's FSDP parameters
        self._names = {one: names.get(id(one.sharded_param), "") for one in _sharded_below(model)}
        #: for each group, the number of forwards whose backward has not run: each may end in a
        #: reduction
        self._left = dict.fromkeys(self._groups, 0)
        #: groups with an idle forward in this step
        self._passed = set[Any]()
        self._forget()
        for group in self._groups:
            self._watch(group, group.pre_forward, group.post_backward)

    def _forget(self) -> None:
        #: parameters with a gradient on this rank, parameters without one since the last step, and
        #: parameters of units that did not run
        self._used, self._missed, self._skipped = set[Any](), set[Any](), set[Any]()
        self._reduced = False

    def _watch(self, group: Any, forward: Callable[..., Any], reduce: Callable[..., None]) -> None:
        def pre_forward(*given: Any) -> Any:
            self._left[group] += torch.is_grad_enabled() and not in_backward()
            return forward(*given)

        def post_backward(*hook: Any) -> None:
            self._left[group] -= 1
            last = self._left[group] <= 0
            if group in self._passed and not last and group.reduce_grads:
                # A rank that ran every forward has all gradients at the last one, and reduces once
                # there.
                with patched(group, reduce_grads=False):
                    reduce(*hook)
                return
            if group.reduce_grads:
                self._complete(group, last=last)
            reduce(*hook)

        group.pre_forward, group.post_backward = pre_forward, post_backward

    def release(self) -> None:
        """Undo the patches."""
        _unpatch(self._groups, "pre_forward", "post_backward")

    def note_passed(self, unit: nn.Module) -> None:
        """Note an idle forward of ``unit`` on this rank. Other ranks may run it."""
        self._passed.update(_groups_of(unit))

    def _complete(self, group: Any, *, last: bool) -> None:
        """Fill missing gradients with zeros before the group is reduced.

        ``last``: no forward of it is left. Nothing is filled if the whole group has no gradient,
        unless ``last`` and the backward pass reached its output.
        """
        self._reduced = True
        members = {parameter for parameter in group.fsdp_params if parameter.sharded_param.requires_grad}
        missing = {parameter for parameter in members if not _has_gradient(parameter)}
        self._used |= members - missing
        if missing == members:
            if not last:  # a unit that ran twice has all gradients at its first forward's backward
                return
            if group._training_state.name != "PRE_BACKWARD":  # the pass did not reach its output
                self._skipped |= members
                return
        for parameter in missing:
            if parameter.sharded_param.grad is None:
                self._missed.add(parameter)
            parameter.unsharded_param.grad = torch.zeros_like(parameter.unsharded_param)

    def finish_backward(self) -> None:
        """After a backward pass, drop the gradient of parameters that no rank used in the window.

        A collective if a group was reduced in the pass.

        Raises:
            PlanError: another rank ran a unit that this one did not run. Their collectives then
                mixed up weights.
        """
        self._left = dict.fromkeys(self._groups, 0)
        self._passed.clear()
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
    """True if the parameter has a gradient that is not reduced yet."""
    unsharded = getattr(parameter, "_unsharded_param", None)  # missing before the first gather
    return getattr(unsharded, "grad", None) is not None or parameter.unsharded_accumulated_grad is not None


def ranks_apart(given: str) -> PlanError:
    """Return the PlanError for ranks that run different modules. ``given`` begins its message."""
    return PlanError.of(
        f"{given}, with sharded weights, which all ranks gather and sum together",
        "run every one on every rank, with 0 times what one does not need in its loss, or use strategy='mp_ddp'",
    )


def sync_hooks_and_requires_grad(model: nn.Module) -> Callable[[], None]:
    """Give gathered parameters the hooks and ``requires_grad`` of their shards.

    Return a function that ends it. The hooks see the whole gradient of this rank before it is
    reduced, as under DDP. FSDP2 itself copies ``requires_grad`` only when it gathers. If shard and
    gathered parameter differ later, the changed one counts. ``toggle_optimizer`` changes the shard,
    and code in a step the gathered parameter.
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
    """At the end of the context, give the hooks of parameters to those that replaced them in it."""
    before: dict[str, Any] = dict(module.named_parameters(remove_duplicate=False))
    yield
    new: Any
    for name, new in module.named_parameters(remove_duplicate=False):
        if new is not before[name]:
            new._backward_hooks = before[name]._backward_hooks
            new._post_accumulate_grad_hooks = before[name]._post_accumulate_grad_hooks


@contextmanager
def unsummed_gradients(model: nn.Module) -> Generator[None, None, None]:
    """Within the context, backward passes of a model's units do not reduce.

    Their gradients are dropped at its end.
    """
    for unit in _units(model):
        unit.set_requires_gradient_sync(False, recurse=False)
    try:
        yield
    finally:
        reset_units(model)


def reset_units(model: nn.Module) -> None:
    """Set the units of ``model`` to their state at the start of a step.

    A failed step leaves them in the midst of it. Gradients that are not reduced yet are dropped.
    """
    for unit in _units(model):
        unit.set_requires_gradient_sync(True, recurse=False)  # over shards and over replicas
        reset = getattr(unit, "reset_iter_state", None)  # torch 2.11 has none
        if reset is not None and _state(unit)._is_root:
            reset()
    for parameter in _sharded_below(model):
        if "unsharded_accumulated_grad" in vars(parameter):  # a property since torch 2.15
            parameter.unsharded_accumulated_grad = None
        if hasattr(parameter, "_unsharded_param"):
            # torch's own gradient of the gathered weight, not the shard's
            cast("Any", Tensor.grad).__set__(parameter._unsharded_param, None)


def make_root(unit: Any) -> None:
    """Make ``unit`` the root now.

    Otherwise a unit inside that is called before the first step becomes a root.
    """
    _state(unit)._lazy_init()


def before_backward_from(loss: Tensor, unit: Any) -> None:
    """Have ``unit`` gathered when a backward pass reaches ``loss``."""
    loss.register_hook(_state(unit)._pre_backward)


def seen_as_whole(module: nn.Module) -> AbstractContextManager[None]:
    """Return a context in which transformers does not see that FSDP manages ``module``.

    Under FSDP, transformers runs layers that LayerDrop leaves out, so wav2vec2 would train without
    LayerDrop.
    """
    return patched(module, _is_fsdp_managed_module=False)


def enter_unit(unit: nn.Module, tensors: list[Tensor]) -> list[Tensor]:
    """Begin an idle forward of ``unit``: gather its weights.

    Return ``tensors`` with FSDP2's backward hook. A collective.
    """
    inputs, _ = _state(unit)._pre_forward(unit, tuple(tensors), {})
    return list(inputs)


def leave_unit(unit: nn.Module, tensors: list[Tensor]) -> list[Tensor]:
    """End an idle forward of ``unit``.

    Return ``tensors`` with a hook that gathers the weights in the backward pass. Without gradients
    return ``tensors``. If the unit is trained, one returned tensor requires a gradient at least.
    """
    state = _state(unit)
    for group in _groups_of(unit):
        group.post_forward(unit, None, None)
    state._training_state = type(state._training_state).IDLE
    if not torch.is_grad_enabled():
        return tensors
    trained = any(parameter.requires_grad for parameter in unit.parameters())
    if trained and tensors and not any(tensor.requires_grad for tensor in tensors):
        # the output of a unit that runs would require a gradient because of its weights
        tensors = [tensors[0] + tensors[0].new_zeros((), requires_grad=True), *tensors[1:]]
    outputs = list[Tensor]()
    for tensor in tensors:
        if tensor.requires_grad:
            tensor.register_hook(state._pre_backward)
            # A clone: torch drops the hook of a view that is changed in place, and hooks of outer
            # units come first.
            tensor = tensor.clone()  # noqa: PLW2901
        outputs.append(tensor)
    return outputs


def _units(model: nn.Module) -> list[FSDPModule]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def _groups_below(model: nn.Module) -> list[Any]:
    return [group for unit in _units(model) for group in _groups_of(unit)]


def _sharded_below(model: nn.Module) -> list[Any]:
    return [parameter for group in _groups_below(model) for parameter in group.fsdp_params]


def _groups_of(unit: Any) -> list[Any]:
    """Return the unit's parameter groups. A group is gathered and reduced as one."""
    state = _state(unit)
    several = getattr(state, "_fsdp_param_groups", None)  # torch 2.11 has one, under the other name
    return [group for group in several or [state._fsdp_param_group] if group is not None]


#: returns torch's FSDP state of a unit
_state = methodcaller("_get_fsdp_state")


def _unpatch(objects: Iterable[Any], *names: str) -> None:
    for one in objects:
        for name in names:
            vars(one).pop(name, None)


# ------------------------------------------------------------------ FSDP1

#: the attribute of a module that keeps its FSDP1 wrapper
FSDP1_ROOT = "_lmp_fsdp1_root"
#: the keyword of FSDP1's ``MixedPrecision`` by which FSDP1 wraps no module apart, as it would batch
#: norms
LEAVE_ALL_MODULES: dict[str, Any] = {"_module_classes_to_ignore": ()}


class FlatWeights:
    """Refuses uses of FSDP1's weights that end silently wrong or in an error of sizes, until ``release``.

    Outside of a step each rank has flat pieces of weights. In a step the weights are whole copies,
    and FSDP1 drops what a user writes to them.
    """

    def __init__(self, root: FullyShardedDataParallel, names: Mapping[int, str]) -> None:
        units: list[Any] = [module for module in root.modules() if isinstance(module, FullyShardedDataParallel)]
        every = [unit._handle for unit in units if unit._handle is not None]
        self._handles = [handle for handle in every if handle.uses_sharded_strategy]
        compiled = any(map(is_compiled, root.modules()))
        #: by the ``id`` of each parameter, what torch knows of its unit, and its name
        self._handle_of: dict[int, Any] = {}
        self._names = names
        #: the names of weights that a user wrote to in a step, on this rank
        self.written = set[str]()
        #: whether ``start`` was called last, and not ``stop``
        self.watches = False
        #: how many forward passes of the root are under way
        self._depth = 0
        self._hooks = [
            root.register_forward_pre_hook(self._enter, prepend=True),
            root.register_forward_hook(self._leave, always_call=True),
        ]
        for handle in self._handles:
            self._handle_of.update((id(parameter), handle) for parameter in handle.flat_param._params)
            # a hook inside of a compiled part would be compiled
            for parameter, info in (
                () if compiled else zip(handle.flat_param._params, handle.flat_param._param_infos, strict=True)
            ):
                before = partial(self._refuse_forward, handle, names[id(parameter)])
                self._hooks.append(info.module.register_forward_pre_hook(before, prepend=True))
        vectors: Any = import_module("torch.nn.utils.convert_parameters")
        self._patch = ExitStack()
        check = partial(self._refuse_vector, vectors._check_param_device)
        self._patch.enter_context(patched(vectors, _check_param_device=check))

    def release(self) -> None:
        """Leave the modules, the units and torch's functions."""
        self.stop()
        while self._hooks:
            self._hooks.pop().remove()
        self._patch.close()

    def start(self) -> None:
        """Note from now on which gathered weights differ from their shards when they are sharded again."""
        self.watches = True
        self.written.clear()
        for handle in self._handles:
            if "reshard" not in vars(handle):
                self._watch(handle, handle.reshard)

    def stop(self) -> None:
        """End what ``start`` began."""
        self.watches = False
        _unpatch(self._handles, "reshard")

    def _watch(self, handle: Any, reshard: Callable[[bool], None]) -> None:
        def check_and_reshard(free_unsharded_flat_param: bool) -> None:
            if not handle.is_sharded(handle.flat_param) and handle._training_state.name != "SUMMON_FULL_PARAMS":
                self._note_written(handle)
            reshard(free_unsharded_flat_param)

        handle.reshard = check_and_reshard

    @torch.no_grad()
    def _note_written(self, handle: Any) -> None:
        """Note the weights whose gathered values are not those of the shard. A device sync."""
        whole, shard = handle.flat_param.detach(), handle.flat_param._local_shard
        start = handle.rank * shard.numel()
        own = whole.flatten()[start : start + shard.numel()]
        differs = own.view(torch.uint8) != shard[: own.numel()].to(own.device).view(torch.uint8)
        at: list[int] = (differs.nonzero().flatten() // own.element_size()).unique().tolist() if differs.any() else []
        infos = zip(
            handle.flat_param._params,
            handle.flat_param._param_infos,
            handle.flat_param._shard_param_infos,
            strict=True,
        )
        for parameter, (key, module, _), piece in infos:
            first = piece.offset_in_shard
            changed = piece.in_shard and any(first <= place < first + piece.numel_in_shard for place in at)
            seen = getattr(module, key, None)
            replaced = isinstance(seen, Tensor) and seen.numel() > 0 and not _share_memory(seen, whole)
            if changed or replaced:
                self.written.add(self._names[id(parameter)])

    def _enter(self, _root: nn.Module, _inputs: Any) -> None:
        self._depth += 1

    def _leave(self, _root: nn.Module, _inputs: Any, _output: Any) -> None:
        self._depth -= 1

    def explains(self, error: BaseException) -> bool:
        """True if code that the error passed through had a weight, or a piece of one, in a variable."""
        parts = [part for handle in self._handles for part in (handle.flat_param, handle.flat_param._full_param_padded)]
        trace = error.__traceback__
        while trace is not None:
            for value in list(trace.tb_frame.f_locals.values()):
                if not isinstance(value, Tensor):
                    continue
                if id(value) in self._handle_of or any(_share_memory(value, part) for part in parts):
                    return True
            trace = trace.tb_next
        return False

    def _refuse_forward(self, handle: Any, name: str, module: nn.Module, _inputs: Any) -> None:
        if self._depth == 0 and not in_backward() and handle.is_sharded(handle.flat_param):
            raise PlanError.of(
                f"a forward of {type(module).__name__} outside of a step, with FSDP1, where {name!r} is a flat piece",
                "use strategy='mp_fsdp2'",
            )

    def _refuse_vector(self, check: Callable[..., Any], parameter: Tensor, *rest: Any) -> Any:
        handle = self._handle_of.get(id(parameter))
        if handle is not None and handle.is_sharded(handle.flat_param):
            raise PlanError.of(
                f"{self._names[id(parameter)]!r} in vector_to_parameters or parameters_to_vector, with FSDP1, where "
                "a rank has a flat piece of it",
                "use strategy='mp_fsdp2'",
            )
        return check(parameter, *rest)


def total_norms_by(norm: Callable[..., Tensor]) -> AbstractContextManager[None]:
    """Return a context in which ``clip_grad_norm_`` calls ``norm``.

    Its arguments are torch's own function, the gradients, and the rest of torch's arguments.
    """
    place: Any = import_module("torch.nn.utils.clip_grad")
    return patched(place, _get_total_norm=partial(norm, place._get_total_norm))
