"""Shard a prepared model with FSDP2: choose units, broadcast weights, materialize meta tensors."""

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from lightning_mp.compat.torch import own_reset, saved_buffers
from lightning_mp.compat.torch_sharding import make_root
from lightning_mp.compat.transformers import IS_INITIALIZED, block_classes, initialiser
from lightning_mp.errors import Faults
from lightning_mp.modules.patterns import (
    called_in,
    has_own_forward,
    matches,
    named_submodules,
    no_match,
    original_class,
)
from lightning_mp.modules.pins import PinMap
from lightning_mp.numerics.dtypes import TORCH_DTYPES, to_torch

#: the number of parameters that makes a module a unit by default: the same as in
#: torch.distributed.fsdp.wrap.size_based_auto_wrap_policy
SIZE_OF_A_UNIT = 100_000_000

#: a function that returns the dtype in which a parameter will be stored
Stored = Callable[[Tensor], torch.dtype]
Wrap = str | type[nn.Module] | Sequence[str | type[nn.Module]] | None


def units(
    root: nn.Module, wrap: Wrap, pin_map: PinMap, stored: Stored, faults: Faults, *, together: str | None = None
) -> tuple[list[nn.Module], list[nn.Module]]:
    """Return the blocks to compile, and the shard units below ``root`` with inner units first.

    Blocks are in definition order. Units are blocks, pinned modules, and modules that keep a
    parameter in a dtype of their own. The root takes all other parameters. Nothing is changed.
    ``faults`` takes patterns of ``wrap`` without a match, units that would hold two dtypes, and
    units of ``wrap`` that share a weight.

    Args:
        root: the module to shard, which may be a part of the module of ``pin_map``.
        wrap: the classes or patterns of the blocks. ``None``: the blocks that transformers names,
            else large modules.
        pin_map: the resolved pins.
        stored: return the dtype in which a parameter will be stored.
        faults: the faults.
        together: a module that is pinned to this dtype is no unit, and stays in the unit around it.
    """
    blocks = _blocks(root, wrap, faults)
    apart = [member.module for member in pin_map.members if member.entry and member.pin.dtype != together]
    apart += [declared.module for declared in pin_map.declared if isinstance(declared.tensor, nn.Parameter)]
    inside = {*root.modules()}
    # A unit is gathered when it is called. Code may iterate over a Sequential without calling it.
    called = dict.fromkeys(one for part in apart if part in inside for one in called_in(part, through_sequential=True))
    # an attention reads its children's weights without calling them, so their hooks would not
    # gather
    attentions = [module for module in root.modules() if isinstance(module, nn.MultiheadAttention)]
    read = {child for attention in attentions for child in attention.children()}
    pinned = [module for module in called if _can_be_unit(module) and module not in read]
    chosen = _keep_ties_together(root, blocks if wrap is not None else (), (*blocks, *pinned), faults)
    depth = {module: name.count(".") for name, module in named_submodules(root)}
    inner = sorted(chosen, key=lambda module: -depth[module])
    _check_dtypes(root, inner, stored, faults)
    return [block for block in blocks if block in chosen], inner


# ------------------------------------------------------------------ candidates


def _blocks(root: nn.Module, wrap: Wrap, faults: Faults) -> list[nn.Module]:
    """Return the modules to wrap in definition order, which usually is the order of execution."""
    if wrap is None:  # the blocks that transformers models name
        present = {original_class(module).__name__ for module in root.modules()}
        given: Sequence[Any] = [n for m in root.modules() for n in block_classes(m) if n in present]
    else:
        given = [wrap] if isinstance(wrap, (str, type)) else list(wrap)
    chosen = set[nn.Module]() if given else _by_size(root)
    for item in dict.fromkeys(given):
        matched = _matching(root, item)
        if not matched and wrap is not None:
            no_match(item if isinstance(item, str) else item.__name__, root, "wrap=", faults)
        chosen |= matched
    return [module for module in root.modules() if module in chosen]


def _matching(root: nn.Module, item: str | type[nn.Module]) -> set[nn.Module]:
    """Return the modules that the pattern or class ``item`` matches, outermost matches only.

    A ``ModuleList`` or a ``Sequential`` is replaced by its children. Modules without parameters are
    left out.
    """
    matched, covered = set[nn.Module](), list[str]()
    for name, module in named_submodules(root):
        cls = original_class(module)
        means = matches(item, name, module) if isinstance(item, str) else issubclass(cls, item)
        if not means or any(name.startswith(f"{above}.") for above in covered):
            continue
        covered.append(name)
        # A unit is gathered when it is called. Code may iterate over a Sequential instead.
        tops = module.children() if cls is nn.Sequential else (module,)
        matched.update(filter(_can_be_unit, (called for top in tops for called in called_in(top))))
    return matched


def _by_size(root: nn.Module) -> set[nn.Module]:
    """Return the modules with ``SIZE_OF_A_UNIT`` parameters or more, and a forward of their own.

    Parameters of a returned module inside another one do not count.
    """
    large = set[nn.Module]()

    def left_over(module: nn.Module) -> int:
        inside = sum(left_over(child) for child in module.children())
        own = inside + sum(parameter.numel() for parameter in module.parameters(recurse=False))
        if own < SIZE_OF_A_UNIT or module is root or not has_own_forward(module):
            return own
        large.add(module)
        return 0

    left_over(root)
    return large


def _can_be_unit(module: nn.Module) -> bool:
    return has_own_forward(module) and any(True for _ in module.parameters())


# ------------------------------------------------------------------ ties and dtypes


def _held(root: nn.Module, chosen: Collection[nn.Module]) -> Iterator[tuple[nn.Module, str, Tensor]]:
    """Yield the unit, the name and the parameter, for each name of each parameter of ``root``."""
    owner: dict[str, nn.Module] = {}
    for name, module in root.named_modules(remove_duplicate=False):
        owner[name] = module if module in chosen or not name else owner[name.rpartition(".")[0]]
        for key, parameter in module.named_parameters(recurse=False):
            yield owner[name], f"{name}.{key}".strip("."), parameter


def _keep_ties_together(
    root: nn.Module, asked: Sequence[nn.Module], candidates: Sequence[nn.Module], faults: Faults
) -> list[nn.Module]:
    """Return the candidates that share no weight with another unit, and all modules of ``asked``.

    A tied weight is one tensor and has one unit. A pinned module, or a block that transformers
    names, then is no unit. Its weights belong to the unit around it. BERT's embeddings, whose table
    is the head's weight, are an example. A module of ``asked`` that shares a weight is added to
    ``faults``.
    """
    chosen = dict.fromkeys(candidates)
    while True:
        holders: dict[int, set[nn.Module]] = {}
        for unit, _, parameter in _held(root, chosen):
            holders.setdefault(id(parameter), set()).add(unit)
        split = {unit for units in holders.values() if len(units) > 1 for unit in units} - {root}
        if split <= set(asked):
            break
        chosen = dict.fromkeys(module for module in chosen if module not in split or module in asked)
    for name, unit in named_submodules(root):
        if unit in split:
            faults.add(
                f"wrap= makes {name!r} a shard unit, which shares a weight with another unit",
                fix="wrap a module that holds all owners, or none of them",
            )
    return list(chosen)


def _check_dtypes(root: nn.Module, inner: Sequence[nn.Module], stored: Stored, faults: Faults) -> None:
    """Add a fault for each unit whose trainable parameters have two dtypes.

    A unit is gathered and reduced as one tensor.
    """
    names = {module: repr(name) for name, module in named_submodules(root)}
    held: dict[nn.Module, dict[torch.dtype, str]] = {}
    for unit, name, parameter in _held(root, inner):
        if parameter.requires_grad and parameter.is_floating_point():
            held.setdefault(unit, {}).setdefault(stored(parameter), name)
    for unit, dtypes in held.items():
        if len(dtypes) > 1:
            where = names.get(unit, "of the whole model")
            given = " and ".join(f"{place} in {str(dtype).removeprefix('torch.')}" for dtype, place in dtypes.items())
            faults.add(
                f"the shard unit {where} would hold two dtypes, and cannot be split: {given}",
                fix="pin a module that is called and shares no weight with others, or untie the weights "
                "(transformers: tie_word_embeddings=False)",
            )


# ------------------------------------------------------------------ equal weights on all ranks


def broadcast_from_first(model: nn.Module, device: torch.device) -> None:
    """Broadcast rank 0's parameters and buffers, one at a time. A collective.

    Tensors on the meta device and DTensors are left out.
    """
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.device.type != "meta" and not hasattr(tensor, "to_local"):
            _broadcast_(tensor, device)


def _broadcast_(tensor: Tensor, device: torch.device, group: dist.ProcessGroup | None = None) -> None:
    """Overwrite ``tensor`` with the value of the group's first rank, sent over ``device``.

    A collective.
    """
    there = tensor.detach().to(device).contiguous()
    # 1-byte dtypes are sent as uint8: gloo knows no float8
    dist.broadcast(there.view(torch.uint8) if there.itemsize == 1 else there, group=group, group_src=0)
    tensor.data.copy_(there)


def share_buffers(model: nn.Module, device: torch.device, group: dist.ProcessGroup | None = None) -> None:
    """Broadcast the saved buffers of the first rank of ``group``. A collective.

    A batch norm's statistics are an example. Each rank updates them by itself. DTensors are left
    out.
    """
    for tensor in saved_buffers(model):
        if not isinstance(tensor, DTensor):
            _broadcast_(tensor, device, group)


def notes_on_parameters(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Return the attributes that a model set on each parameter, by the parameter's name.

    S4's ``_optim`` and Mamba's ``_no_weight_decay`` are examples.
    """
    return {name: dict(vars(parameter)) for name, parameter in model.named_parameters()}


def restore_notes(model: nn.Module, noted: dict[str, dict[str, Any]]) -> None:
    """Set the attributes ``noted`` on the parameters again.

    ``fully_shard`` and ``to`` make new parameters without them. An attribute that a parameter has
    already keeps its value.
    """
    for name, parameter in model.named_parameters():
        for key, value in noted.get(name, {}).items():
            if key not in vars(parameter):
                setattr(parameter, key, value)


def shard(
    model: nn.Module,
    inner: Sequence[nn.Module],
    mesh: DeviceMesh,
    device: torch.device,
    reduce_dtype: str,
    *,
    cpu_offload: bool = False,
    **options: Any,
) -> None:
    """Materialize and shard the units ``inner``, then ``model``, in place over ``mesh``.

    Every rank calls it. There is no ``param_dtype``: it would change the dtype of norms and
    embeddings, and a step would differ from DDP.

    Args:
        model: the root unit. ``reshard_after_forward`` does not apply to it.
        inner: the other units, inner units first.
        mesh: the mesh of shards, and of replicas.
        device: this rank's device.
        reduce_dtype: the dtype in which gradients are reduced.
        cpu_offload: keep shards on the CPU.
        **options: keywords of ``fully_shard``, which replace the ones made here.

    Raises:
        PlanError: a module's initialisation left a tensor of the meta device untouched.
    """
    options = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(reduce_dtype=to_torch(reduce_dtype), cast_forward_inputs=False),
        "offload_policy": CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu") if cpu_offload else OffloadPolicy(),
        **options,
    }
    place = torch.device("cpu") if cpu_offload else device
    for unit in inner:
        materialize(unit, model, place, device)
        fully_shard(unit, **options)
    materialize(model, model, place, device)
    # The root's forward is the whole step, and the backward pass begins at once after it. A step
    # that calls self(x) still needs the root's weights after that call.
    options.pop("reshard_after_forward", None)
    fully_shard(model, **options)
    make_root(model)  # otherwise a block that is called before the first step would become a root


def whole_on_cpu(value: Any, *, keep: bool = True) -> Any:
    """Return a tensor on the CPU, whole if it is a DTensor: then it is a collective.

    Unless ``keep``, return ``None`` for a tensor. Any other value is returned as it is.
    """
    if isinstance(value, DTensor):
        value = value.full_tensor()
    if not isinstance(value, Tensor):
        return value
    return value.detach().cpu() if keep else None


# ------------------------------------------------------------------ the meta device

_FLOATING = (*TORCH_DTYPES.values(), torch.float64)


def cannot_initialise(model: nn.Module, faults: Faults) -> None:
    """Add a fault for each module with tensors on the meta device that has no initialiser."""
    for name, module in model.named_modules():
        if any(tensor.is_meta for tensor in _own(module).values()) and not _initialisers(module, model):
            faults.add(
                f"module {name or type(model).__name__!r} on the meta device, which has no reset_parameters()",
                fix="give the module reset_parameters(), or build it outside init_module(empty_init=True)",
            )


def materialize(
    unit: nn.Module, root: nn.Module, place: torch.device, device: torch.device, *, recurse: bool = True
) -> None:
    """Allocate and initialise ``unit``'s tensors of the meta device, and broadcast rank 0's values.

    It is a collective if there is such a tensor, else it does nothing. Tied tensors stay tied in
    ``root``, and the first owner decides their values.

    Args:
        unit: the module whose tensors are made.
        root: the whole model.
        place: the device of the new tensors.
        device: the device over which ranks communicate.
        recurse: False makes only the tensors of ``unit`` itself, without its children's.

    Raises:
        PlanError: a floating tensor holds a NaN after its module's initialisation, which left it
            untouched.
    """
    every = list(unit.modules() if recurse else (unit,))
    waiting = [module for module in every if any(one.is_meta for one in _own(module).values())]
    if not waiting:
        return
    kept = {id(one): one for module in waiting for one in _own(module).values() if one.is_meta}
    made = {key: _marked(one, place) for key, one in kept.items()}
    for module in root.modules():  # all owners of a tied tensor
        for key, tensor in _own(module).items():
            if id(tensor) in made:
                setattr(module, key, made[id(tensor)])
    with torch.no_grad():
        for module in reversed(waiting):  # children before parents, as ``apply`` does
            for initialiser in _initialisers(module, root):
                initialiser()
    untouched = {id(one) for one in made.values() if one.dtype in _FLOATING and bool(one.detach().isnan().any())}
    with Faults("strategy") as faults:
        for name, tensor in (*root.named_parameters(), *root.named_buffers()) if untouched else ():
            if id(tensor) in untouched:
                faults.add(
                    f"{name!r} on the meta device, which its module's initialisation leaves as it is",
                    fix="set it in reset_parameters(), or build the module outside init_module(empty_init=True)",
                )
    for tensor in made.values():
        _broadcast_(tensor, device)


def _own(module: nn.Module) -> dict[str, Tensor]:
    parameters = module.named_parameters(recurse=False, remove_duplicate=False)
    return dict([*parameters, *module.named_buffers(recurse=False, remove_duplicate=False)])


def _marked(tensor: Tensor, place: torch.device) -> Tensor:
    """Return a tensor or parameter like ``tensor`` at ``place``, with its attributes.

    A floating one is filled with NaN, which marks it as not initialised. Others are filled with 0.
    """
    mark = math.nan if tensor.dtype in _FLOATING else 0
    new = torch.full_like(tensor.detach(), mark, device=place)
    if isinstance(tensor, nn.Parameter):
        new = nn.Parameter(new, requires_grad=tensor.requires_grad)
    for key, value in vars(tensor).items():
        if key != IS_INITIALIZED:
            setattr(new, key, value)
    return new


def _initialisers(module: nn.Module, root: nn.Module) -> list[Callable[[], Any]]:
    """Return the functions that initialise ``module``, in order. The list may be empty.

    They are its own ``reset_parameters``, and ``_init_weights`` of the innermost model around it
    that has this method of transformers' convention.
    """
    own = own_reset(module)
    inside = [one for one in root.modules() if initialiser(one) and any(part is module for part in one.modules())]
    around = initialiser(inside[-1]) if inside else None
    return [*([own] if own else []), *([partial(around, module)] if around else [])]
